"""Noise against problems whose gradient and covariance are known."""

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError
from stretto.analysis.noise_scale import NoiseScale, estimate, noise_scale


class Point(nn.Module):
    """Parameters that are the output, whatever the input."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self, x):
        return self.values.expand(len(x), -1)


def half_square(output, target):
    """The gradient of an example is w - x."""
    return ((output - target) ** 2).sum(1).mean() / 2


def test_it_is_the_sample_covariance():
    """Of batches of one example: numpy's unbiased variance, added up, to the last digits."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)
    found = noise_scale(Point(at), half_square, [(row[None], row[None]) for row in x])
    trace = np.var(x.numpy(), axis=0, ddof=1).sum()
    assert found.trace == pytest.approx(trace, rel=1e-12)
    mean = (at - x.mean(0)).numpy()
    assert found.square == pytest.approx(mean @ mean - trace / 40, rel=1e-12)


@pytest.mark.slow
def test_it_is_unbiased():
    """x ~ N(mu, diag(1, 4, 9)) at |w - mu| = 2: trace 14, square 4, averaged over many small measurements."""
    draw = torch.Generator().manual_seed(1)
    spread, model = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), Point(torch.tensor([0.0, 2.0, 0.0]).double())
    traces, squares = [], []
    for _ in range(400):
        x = torch.randn(8, 4, 3, generator=draw, dtype=torch.float64) * spread
        found = noise_scale(model, half_square, [(batch, batch) for batch in x])
        traces.append(found.trace)
        squares.append(found.square)
    for values, truth in ((traces, 14), (squares, 4)):
        assert abs(np.mean(values) - truth) < 3 * np.std(values) / 20
        assert np.std(values) / 20 < 0.05 * truth
    assert NoiseScale(np.mean(traces), np.mean(squares)).scale == pytest.approx(3.5, rel=0.1)


def test_a_linear_regression():
    """y = x w* + e, x ~ N(0, 1) in n dimensions: G = d = w - w*, trace (n + 1) |d|^2 + n sigma^2."""
    n, sigma, draw = 6, 0.5, torch.Generator().manual_seed(2)
    torch.manual_seed(0)
    model = nn.Linear(n, 1, bias=False).double()
    d = model.weight.detach() - 0.3
    x = torch.randn(40_000, n, generator=draw, dtype=torch.float64)
    y = x @ torch.full((n, 1), 0.3).double() + sigma * torch.randn(40_000, 1, generator=draw, dtype=torch.float64)
    found = noise_scale(model, half_square, zip(x.split(100), y.split(100), strict=True))
    square = float((d**2).sum())
    assert found.square == pytest.approx(square, rel=0.03)
    assert found.trace == pytest.approx((n + 1) * square + n * sigma**2, rel=0.1)


def test_two_batch_sizes():
    assert estimate((10, 5.0), (50, 1.8)) == NoiseScale(trace=pytest.approx(40.0), square=pytest.approx(1.0))
    assert estimate((10, 5.0), (50, 1.8)).scale == pytest.approx(40.0)
    assert NoiseScale(trace=1.0, square=-0.1).scale is None
    with pytest.raises(UsageError, match="batches of 50 and 10 examples"):
        estimate((50, 1.0), (10, 1.0))


def test_nothing_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    batches = list(zip(x.split(2), y.split(2), strict=True))
    first = stretto.noise_scale(model, nn.functional.cross_entropy, batches)
    with torch.no_grad():
        assert stretto.noise_scale(model, nn.functional.cross_entropy, batches) == first
        stretto.sharpness(model, nn.functional.cross_entropy, batches)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_measured():
    x, model = torch.ones(6, 3), nn.Linear(3, 3)
    for batches in ([], [(x, x)], [(x[:4], x[:4]), (x[4:], x[4:])]):
        with pytest.raises(UsageError, match="two or more batches, all of one size"):
            noise_scale(model, nn.functional.mse_loss, batches)
    with pytest.raises(UsageError, match="no trainable parameters"):
        noise_scale(nn.ReLU(), nn.functional.mse_loss, [(x, x)])
