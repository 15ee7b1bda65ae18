"""Sharpness against whole Hessians and their exact eigenvalues."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from stretto import UsageError, data, models
from stretto.analysis.sharpness import sharpness


class Weights(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.values = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x):
        return self.values


def quadratic(eigenvalues):
    """w A w / 2 with these eigenvalues, in directions that are no axes."""
    draw = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=draw, dtype=torch.float64))[0]
    matrix = turn @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ turn.T
    return lambda output, _: output @ matrix @ output / 2


ONE = [(torch.zeros(1), torch.zeros(1))]


@pytest.mark.parametrize(
    ("eigenvalues", "largest"),
    [
        ([3.0, 1.0, 0.5], 3.0),
        ([3.0, -1.0, 0.5], 3.0),
        ([2.0, -9.0, 0.5], 2.0),
        ([-2.0, -9.0, -5.0], -2.0),
        ([4.0], 4.0),
    ],
)
def test_a_quadratic(eigenvalues, largest):
    found = sharpness(Weights(len(eigenvalues)), quadratic(eigenvalues), ONE, tolerance=1e-6)
    assert found.converged
    assert found.value == pytest.approx(largest, rel=1e-9)


def test_one_large_negative_eigenvalue_among_many_small_ones():
    """A random vector is nearly an eigenvector of H minus that one: it is not yet near the largest eigenvalue."""
    eigenvalues = [-30.0, 2.0, *torch.linspace(-0.01, 0.01, 400).tolist()]
    found = sharpness(Weights(len(eigenvalues)), quadratic(eigenvalues), ONE, products=1000)
    assert found.converged
    assert found.value == pytest.approx(2.0, rel=0.01)


def test_a_networks_whole_hessian():
    """Over batches of unequal sizes: the Hessian of the mean over all examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.arange(11) % 4
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)

    def whole(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    wanted = torch.linalg.eigvalsh(torch.autograd.functional.hessian(whole, flat))[-1]
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    found = sharpness(model, nn.functional.cross_entropy, batches, tolerance=1e-6, products=2000)
    assert found.value == pytest.approx(float(wanted), rel=1e-9)
    rough = sharpness(model, nn.functional.cross_entropy, batches, products=3)
    assert (rough.converged, rough.products) == (False, 3)
    assert 0 < rough.value <= float(wanted)


def test_the_start_is_the_seeds():
    model = nn.Linear(3, 2)
    x, y = torch.eye(3), torch.arange(3) % 2
    few = [sharpness(model, nn.functional.cross_entropy, [(x, y)], products=2, seed=s).value for s in (0, 0, 1)]
    assert few[0] == few[1] != few[2]


def test_a_loss_that_does_not_bend():
    found = sharpness(nn.Linear(3, 1), lambda output, _: output.mean(), [(torch.ones(2, 3), None)])
    assert (found.value, found.converged) == (0.0, True)


SLOW = [pytest.param(name, {}, marks=pytest.mark.slow) for name in ("mlp", "cnn", "transformer")]


@pytest.mark.parametrize(
    ("name", "options"), [("mlp", {"width": 16}), ("cnn", {"width": 4}), ("transformer", {"width": 8}), *SLOW]
)
def test_the_built_in_networks_can_be_differentiated_twice(name, options):
    dataset = data.load("pydoc") if name == "transformer" else data.load("digits")
    built = models.build(name, dataset, seed=0, depth=2, **options)
    found = sharpness(nn.Sequential(*built.layers), built.loss, [(dataset.train.x[:4], dataset.train.y[:4])])
    assert found.value > 0


def test_no_examples():
    with pytest.raises(UsageError, match="sharpness got no examples"):
        sharpness(nn.Linear(3, 1), nn.functional.mse_loss, [])
