"""What the theory of basis rotation says, on a quadratic whose eigenbasis is known (Jung et al. 2026, 2602.03515).

f(W) = sum of lam_ij (A^T W B)_ij^2 / 2 has the curvatures lam_ij along the columns a_i b_j^T. Adam is a method of
coordinates: at A = B = 1 it knows each curvature apart, and else it mixes them. In the basis A, B its step is that of
the first case, whatever A and B are; and L and R, averages of G G^T and G^T G, have A and B as their eigenvectors, so
that rotated Adam gets there by itself, also where gradients are stale.
"""

import pytest
import torch
from torch import nn

import stretto
from stretto.optim import RotatedAdam

N, M = 6, 5
OPTIONS = {"betas": (0.9, 0.99), "weight_decay": 0.1}


def basis(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def curvatures():
    left, right = (torch.logspace(0, -1.5, size, dtype=torch.float64) for size in (N, M))
    return left[:, None] * right


def value(w, a, b, target=0.0):
    return (curvatures() * (a.T @ w @ b - target) ** 2).sum() / 2


def descend(make, a, b, updates=25):
    """A^T W B after updates from a start that is the same in that basis, along gradients with noise of every rank."""
    generator = torch.Generator().manual_seed(3)
    w = nn.Parameter(a @ torch.ones(N, M, dtype=torch.float64) @ b.T)
    step = make(w)
    for _ in range(updates):
        target = torch.randn(N, M, generator=generator, dtype=torch.float64)
        w.grad = torch.autograd.grad(value(w, a, b, target), w)[0]
        step()
    return a.T @ w.detach() @ b


def adam(w):
    return torch.optim.AdamW([w], lr=0.03, **OPTIONS).step


def begun_in(a, b):
    """Rotated AdamW whose bases start as a and b."""

    def make(w):
        optimizer = torch.optim.AdamW([w], lr=0.03, **OPTIONS)
        optimizer.state[w] = {
            "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w),
            "left_product": torch.zeros(N, N).double(), "left_basis": a.clone(),
            "right_product": torch.zeros(M, M).double(), "right_basis": b.clone(),
        }  # fmt: skip
        return RotatedAdam(optimizer, 4).step

    return make


def test_the_path_does_not_depend_on_the_coordinates():
    """Exactly: W -> A W B^T, gradients and bases with it. Adam's path does."""
    one, (a, b) = (torch.eye(N).double(), torch.eye(M).double()), (basis(N, 1), basis(M, 2))
    torch.testing.assert_close(descend(begun_in(a, b), a, b), descend(begun_in(*one), *one), rtol=0, atol=1e-11)
    assert (descend(adam, a, b) - descend(adam, *one)).abs().max() > 0.1


def test_where_the_eigenbasis_is_that_of_the_coordinates_nothing_changes():
    """L and R are diagonal: the step is that of torch's AdamW."""
    ends = []
    for rotated in (False, True):
        w = nn.Parameter(torch.arange(1.0, 6.0).diag().double())
        optimizer = torch.optim.AdamW([w], lr=0.03, **OPTIONS)
        step = RotatedAdam(optimizer, 1).step if rotated else optimizer.step
        for _ in range(10):
            w.grad = (torch.arange(1, 6) ** 2).diag() * w.detach()
            step()
        ends.append(w.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-13)


class Point(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x):
        return self.w * x


def trained(method, *, turned, updates, delay, rate):
    """The loss after updates with stale gradients, and how near the bases are to the eigenbasis."""
    a, b = (basis(N, 1), basis(M, 2)) if turned else (torch.eye(N).double(), torch.eye(M).double())
    start = a @ torch.ones(N, M, dtype=torch.float64) @ b.T
    trainer = stretto.Trainer(
        [Point(start), *[nn.Identity() for _ in range(delay)]], lambda w, target: value(w, a, b, target),
        lambda params: torch.optim.Adam(params, lr=rate, betas=(0.9, 0.99)), method, device="cpu",
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda k: max(0.0, 1 - k / updates)),
    )  # fmt: skip
    generator, ones = torch.Generator().manual_seed(1), torch.ones(N, M, dtype=torch.float64)
    for _ in range(updates):
        trainer.step(ones, 0.02 * torch.randn(N, M, generator=generator, dtype=torch.float64))
    trainer.flush()
    state = trainer.optimizers[0].state[trainer.stages[0].w]
    near = [
        (eigenbasis.T @ state[key]).abs().max(0).values.mean()
        for eigenbasis, key in ((a, "left_basis"), (b, "right_basis"))
        if key in state
    ]
    return value(trainer.stages[0].w.detach(), a, b).item(), near


@pytest.mark.parametrize(
    ("run", "worse", "smaller"),
    [
        ({"updates": 100, "delay": 4, "rate": 0.1}, 10, 5),
        pytest.param({"updates": 300, "delay": 8, "rate": 0.05}, 100, 50, marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_rotation_undoes_what_a_turned_basis_does_to_adam_under_delay(run, worse, smaller):
    """Adam's loss is up to hundreds of times as large in turned coordinates; rotated, it is small there, too."""
    straight, turned = (trained("pipedream", turned=each, **run)[0] for each in (False, True))
    two_sided, near = trained("pipedream(rotate=True)", turned=True, **run)
    assert turned > worse * straight
    assert two_sided < turned / smaller
    assert min(near) > 0.8  # 1 where each column is an eigenvector; about 0.7 for bases drawn at random
