"""Every head trains what it is for, by greedy."""

import pytest
import torch

import stretto
from stretto import data, models
from stretto.data import forever


def trained(model, dataset, head, *, steps, lr, batch=32, **options):
    built = models.build(model, dataset, **options)
    stages = stretto.split(built.layers, len(built.layers), example=dataset.train.x[:2])
    trainer = stretto.Trainer(
        stages,
        built.loss,
        lambda p: torch.optim.Adam(p, lr=lr),
        f"greedy(head={head})",
        example=dataset.train.x[:batch],
    )
    for _, (x, y) in zip(range(steps), forever(dataset.train, batch, seed=0), strict=False):
        trainer.step(x, y)
    trainer.flush()
    return trainer.evaluate(dataset.validation.batches(256))


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("mlp", "two-layer"),
        *(pytest.param(*each, marks=pytest.mark.slow)
          for each in (("mlp", "auglocal"), ("cnn", "infopro"), ("mlp", "infopro"), ("cnn", "two-layer"),
                       ("cnn", "auglocal"))),
    ],
)  # fmt: skip
def test_digits(model, head):
    result = trained(model, data.load("digits"), head, steps=80, lr=0.005, depth=4, width=16 if model == "cnn" else 48)
    assert result["accuracy"] > 0.8


@pytest.mark.parametrize(
    "head", ["language", *(pytest.param(head, marks=pytest.mark.slow) for head in ("two-layer", "auglocal"))]
)
def test_pydoc(head):
    text = data.load("pydoc", context=16)
    result = trained("transformer", text, head, steps=60, lr=0.01, depth=3, width=16, heads=2)
    counts = torch.bincount(text.validation.y.flatten(), minlength=text.num_classes)
    always_the_same = torch.distributions.Categorical(counts.double()).entropy()
    assert result["loss"] < always_the_same
