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
        (*MLP, *BY_SGD),
        (*CNN, *BY_ADAM),
        pytest.param(*MLP, *BY_ADAM, marks=pytest.mark.slow),
        pytest.param(*CNN, *BY_SGD, marks=pytest.mark.slow),
    ],
)
def test_digits_are_learned(name, steps, least, optimizer, seed):
    data = load("digits")
    batches = islice(forever(data.train, 32, seed), steps)
    network = train(build(name, data, seed=seed), batches, optimizer)
    with torch.no_grad():
        accuracy = (network(data.validation.x).argmax(-1) == data.validation.y).float().mean()
    assert accuracy > least


@pytest.mark.parametrize(("level", "margin"), [("byte", 0.4), pytest.param("word", 0.25, marks=pytest.mark.slow)])
def test_language_is_learned_beyond_the_frequencies(level, margin):
    """Lower by a margin (in nats) than the best that single tokens' frequencies allow: the context was used."""
    data = load("pydoc", level=level, context=32)
    frequency = torch.bincount(data.train.y.flatten(), minlength=data.num_classes) + 1.0
    target = data.validation.y
    unigram = -(frequency / frequency.sum()).log()[target].mean()
    model = build("transformer", data, depth=2)
    network = train(model, islice(forever(data.train, 16, 0), 150), lambda params: torch.optim.Adam(params, lr=3e-3))
    with torch.no_grad():
        loss = model.loss(network(data.validation.x), target)
    assert loss < unigram - margin


def test_training_twice_gives_the_same_weights():
    data = load("digits")
    first, second = (
        train(build("cnn", data, depth=2, width=8), islice(forever(data.train, 16, 3), 5), sgd) for _ in range(2)
    )
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
