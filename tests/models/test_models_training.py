"""Each model learns its data by plain backpropagation: the built-in networks are worth comparing methods on."""

from itertools import islice

import pytest
import torch
from torch import nn

from stretto.data import forever, load
from stretto.models import build


def train(model, batches, optimizer):
    network = nn.Sequential(*model.layers)
    stepper = optimizer(network.parameters())
    for x, y in batches:
        stepper.zero_grad()
        model.loss(network(x), y).backward()
        stepper.step()
    return network.eval()


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=1e-3)


MLP, CNN, BY_SGD, BY_ADAM = ("mlp", 300, 0.9), ("cnn", 70, 0.95), (sgd, 0), (adam, 1)


@pytest.mark.parametrize(
    ("name", "steps", "least", "optimizer", "seed"),
    [
        ("mlp", 150, 0.9, *BY_SGD),
        ("cnn", 50, 0.95, *BY_ADAM),
        *(pytest.param(*network, *way, marks=pytest.mark.slow) for network in (MLP, CNN) for way in (BY_SGD, BY_ADAM)),
    ],
)
def test_digits_are_learned(name, steps, least, optimizer, seed):
    data = load("digits")
    batches = islice(forever(data.train, 32, seed), steps)
    network = train(build(name, data, seed=seed), batches, optimizer)
    with torch.no_grad():
        accuracy = (network(data.validation.x).argmax(-1) == data.validation.y).float().mean()
    assert accuracy > least


SHORT = 16, 32, 60, 1e-2, {"depth": 1, "width": 32}  # tokens, texts of a batch, steps, rate, options
LONG = 32, 16, 150, 3e-3, {"depth": 2}


@pytest.mark.parametrize(
    ("level", "margin", "how"),
    [
        ("byte", 0.2, SHORT),
        pytest.param("byte", 0.4, LONG, marks=pytest.mark.slow),
        pytest.param("word", 0.25, LONG, marks=pytest.mark.slow),
    ],
    ids=["short", "byte", "word"],
)
def test_language_is_learned_beyond_the_frequencies(level, margin, how):
    """Lower by a margin (in nats) than the best that single tokens' frequencies allow: the context was used."""
    context, batch, steps, lr, options = how
    data = load("pydoc", level=level, context=context)
    frequency = torch.bincount(data.train.y.flatten(), minlength=data.num_classes) + 1.0
    target = data.validation.y
    unigram = -(frequency / frequency.sum()).log()[target].mean()
    model = build("transformer", data, **options)
    network = train(model, islice(forever(data.train, batch, 0), steps), lambda params: torch.optim.Adam(params, lr=lr))
    with torch.no_grad():
        loss = model.loss(network(data.validation.x), target)
    assert loss < unigram - margin


def test_training_twice_gives_the_same_weights():
    data = load("digits")
    first, second = (
        train(build("cnn", data, depth=2, width=8), islice(forever(data.train, 16, 3), 5), sgd) for _ in range(2)
    )
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
