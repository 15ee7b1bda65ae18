"""Asynchronous and synchronous pipelines equal an explicit-version reference in numpy, from fill to drain."""

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from laws.numpy_network import Network, train

S, STEPS, BATCH = 5, 23, 12
WIDTHS = [6, 7, 8, 7, 6, 4]

DELAYS = {
    "backprop": lambda s: 0,
    "gpipe": lambda s: 0,
    "1f1b(microbatches=6)": lambda s: 0,
    "zb-h1": lambda s: 0,
    "pipedream": lambda s: S - 1 - s,
    "pipedream-2bw": lambda s: 1,
    "pipedream-2bw(microbatches=7)": lambda s: 1,
}


def modules(network):
    stages = []
    for s, (w, b) in enumerate(network.start):
        linear = nn.Linear(w.shape[1], w.shape[0], dtype=torch.float64)
        linear.weight.data, linear.bias.data = torch.tensor(w), torch.tensor(b)
        stages.append(linear if s == S - 1 else nn.Sequential(linear, nn.Tanh()))
    return stages


def batches(seed=1):
    draw = np.random.default_rng(seed)
    return [(draw.normal(size=(BATCH, WIDTHS[0])), draw.integers(0, WIDTHS[-1], BATCH)) for _ in range(STEPS)]


@pytest.mark.parametrize("workers", [None, 1, 3, 5])
@pytest.mark.parametrize("method", DELAYS)
def test_weights_and_losses_equal_the_reference(method, workers):
    network, data = Network(WIDTHS), batches()
    expected, losses = train(network, data, DELAYS[method])
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3), method, workers=workers,
    )  # fmt: skip
    got = [trainer.step(torch.tensor(x), torch.tensor(y)) for x, y in data]
    got = [loss for loss in got if loss is not None] + trainer.flush()
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-10)
    for (w, b), stage in zip(expected, trainer.stages, strict=True):
        linear = stage if isinstance(stage, nn.Linear) else stage[0]
        np.testing.assert_allclose(linear.weight.detach().numpy(), w, rtol=0, atol=1e-10)
        np.testing.assert_allclose(linear.bias.detach().numpy(), b, rtol=0, atol=1e-10)


def test_the_reference_knows_delay_from_none():
    """A check that cannot fail is none: the delays of this test change the weights by more than the tolerance."""
    network, data = Network(WIDTHS), batches()
    plain = train(network, data, lambda s: 0)[0]
    for delay in (lambda s: 1, lambda s: S - 1 - s):
        other = train(network, data, delay)[0]
        assert max(np.abs(a[0] - b[0]).max() for a, b in zip(plain, other, strict=True)) > 1e-3
