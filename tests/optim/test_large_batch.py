"""LARS and LAMB against their papers' formulas in numpy, and against the optimizers they are where every ratio is 1."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from stretto.checkpoint.tree import flatten, unflatten
from stretto.errors import UsageError
from stretto.optim import LAMB, LARS, Masters, layerwise

SHAPES = ((5, 3), (3,), (2, 3, 2, 2), (), (4, 4))  # the last begins as zeros; the fourth has no dimension
STEPS = 60


def start():
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal(shape) for shape in SHAPES]
    weights[-1] = np.zeros(SHAPES[-1])
    return weights


def gradients(steps=STEPS):
    """For each step one gradient a weight; now and then none at all, or all zeros."""
    draw = np.random.default_rng(1)
    for step in range(steps):
        row = [draw.standard_normal(shape) * 10.0 ** draw.integers(-3, 3) for shape in SHAPES]
        row[0] = None if step % 7 == 3 else row[0]
        row[2] = np.zeros(SHAPES[2]) if step % 5 == 2 else row[2]
        yield row


def rate(step):
    return 0.5 if step < 20 else 0.1


def by_torch(make, steps=STEPS):
    parameters = [nn.Parameter(torch.tensor(each)) for each in start()]
    optimizer = make(parameters)
    for step, row in enumerate(gradients(steps)):
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def lars_in_numpy(momentum, decay, trust, eps, vectors):
    weights, velocities = start(), [np.zeros(shape) for shape in SHAPES]
    for step, row in enumerate(gradients()):
        for i, g in enumerate(row):
            if g is None:
                continue
            w, r, wd = weights[i], 1.0, decay
            if w.ndim < 2 and not vectors:
                wd = 0.0
            elif np.linalg.norm(w) > 0 and np.linalg.norm(g) > 0:
                r = trust * np.linalg.norm(w) / (np.linalg.norm(g) + wd * np.linalg.norm(w) + eps)
            velocities[i] = momentum * velocities[i] + r * (g + wd * w)
            weights[i] = w - rate(step) * velocities[i]
    return weights


def lamb_in_numpy(beta1, beta2, eps, decay, vectors):
    weights, counts = start(), [0] * len(SHAPES)
    first, second = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step, row in enumerate(gradients()):
        for i, g in enumerate(row):
            if g is None:
                continue
            counts[i] += 1
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            u = first[i] / (1 - beta1 ** counts[i]) / (np.sqrt(second[i] / (1 - beta2 ** counts[i])) + eps)
            r = 1.0
            if vectors or weights[i].ndim > 1:
                u = u + decay * weights[i]
                if np.linalg.norm(weights[i]) > 0 and np.linalg.norm(u) > 0:
                    r = np.linalg.norm(weights[i]) / np.linalg.norm(u)
            weights[i] = weights[i] - rate(step) * r * u
    return weights


def assert_close(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_is_the_papers(momentum, decay, vectors):
    def make(params):
        return LARS(params, lr=1.0, momentum=momentum, weight_decay=decay, trust=0.02, eps=1e-6, vectors=vectors)

    assert_close(by_torch(make), lars_in_numpy(momentum, decay, 0.02, 1e-6, vectors))


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_lamb_is_the_papers(betas, decay, vectors):
    def make(params):
        return LAMB(params, lr=1.0, betas=betas, eps=1e-6, weight_decay=decay, vectors=vectors)

    assert_close(by_torch(make), lamb_in_numpy(*betas, 1e-6, decay, vectors))


def ones(ratios, *_):
    return torch.ones_like(ratios)


def test_with_every_ratio_1_lars_is_sgd(monkeypatch):
    monkeypatch.setattr(layerwise, "one_where_a_norm_is_zero", ones)
    found = by_torch(lambda params: LARS(params, lr=1.0, weight_decay=0.05, vectors=True))
    assert_close(found, by_torch(lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9, weight_decay=0.05)))


def test_with_every_ratio_1_lamb_is_adamw(monkeypatch):
    monkeypatch.setattr(layerwise, "one_where_a_norm_is_zero", ones)
    found = by_torch(lambda params: LAMB(params, weight_decay=0.05, vectors=True))
    assert_close(found, by_torch(lambda params: torch.optim.AdamW(params, eps=1e-6, weight_decay=0.05)))


def test_vectors_alone_are_sgds_and_adamws():
    """To the bit: that is what biases and norms get."""
    vectors = [i for i, shape in enumerate(SHAPES) if len(shape) < 2]
    for mine, theirs in (
        (lambda p: LARS(p, lr=1.0, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
        (lambda p: LAMB(p, weight_decay=0.1), lambda p: torch.optim.AdamW(p, eps=1e-6, weight_decay=0)),
    ):
        found, wanted = by_torch(mine), by_torch(theirs)
        for i in vectors:
            np.testing.assert_allclose(found[i], wanted[i], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=0.5, eps=0.0), lambda p: LAMB(p, lr=0.1, eps=0.0)])
def test_the_scale_of_gradients_does_not_matter(make):
    """What they are for: a layer moves by a share of its norm, whatever the loss is multiplied by."""
    ends = []
    for scale in (1.0, 1024.0):
        weight = nn.Parameter(torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3))
        optimizer = make([weight])
        for step in range(5):
            weight.grad = scale * torch.sin(weight.detach() + step)
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-14, atol=0)


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=0.5), LAMB])
def test_a_state_goes_through_a_checkpoint(make):
    def train(parameter, optimizer, steps):
        for step in steps:
            parameter.grad = torch.cos(parameter.detach() * step)
            optimizer.step()

    whole = nn.Parameter(torch.ones(3, 2))
    train(whole, make([whole]), range(8))
    half = nn.Parameter(torch.ones(3, 2))
    first = make([half])
    train(half, first, range(4))
    second = make([half])
    second.load_state_dict(unflatten(*flatten(copy.deepcopy(first.state_dict()))))
    train(half, second, range(4, 8))
    assert torch.equal(half, whole)


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=0.5), LAMB])
def test_a_closure_is_called_with_gradients(make):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make([weight])

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert not torch.equal(weight.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=0.5), LAMB])
def test_mixed_types_and_low_precision(make):
    """Types may be mixed in a group; float32 masters of bfloat16 weights take the same steps as float32 weights."""
    plain = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    low = nn.Parameter(plain.detach().bfloat16())
    masters = Masters({low: nn.Parameter(plain.detach().clone())})
    optimizer, other = make([masters.of(low)]), make([plain, nn.Parameter(torch.ones(2, 2, dtype=torch.float64))])
    for step in range(4):
        gradient = torch.sin(torch.arange(12.0) + step).view(3, 4).bfloat16()
        low.grad, plain.grad, other.param_groups[0]["params"][1].grad = (
            gradient,
            gradient.float(),
            torch.eye(2).double(),
        )
        masters.step(optimizer.step)
        other.step()
        optimizer.zero_grad()
    assert torch.equal(masters.of(low), plain)
    assert torch.equal(low, plain.bfloat16())


def test_sparse_gradients_are_refused():
    for make in (lambda p: LARS(p, lr=0.5), LAMB):
        embedding = nn.Embedding(4, 2, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match="takes no sparse gradients: make the embedding with sparse=False"):
            make(embedding.parameters()).step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LARS(p, lr=-1.0), "lr=-1.0"),
        (lambda p: LARS(p, lr=1.0, momentum=1.0), r"momentum=1.0: choose a value from 0 up to, but not including, 1"),
        (lambda p: LARS(p, lr=1.0, trust=float("nan")), "trust=nan: choose a value of 0 or more"),
        (lambda p: LAMB(p, eps=-1.0), "eps=-1.0"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), r"betas\[1\]=1.0"),
    ],
)
def test_nonsense(make, message):
    with pytest.raises(UsageError, match=message):
        make([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("method", ["pb-sc", "pb-lwp", "pipeoptim"])
def test_cures_that_know_another_step_refuse_them(method):
    import stretto

    stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
    with pytest.raises(UsageError, match="this optimizer is LARS"):
        stretto.Trainer(stages, nn.functional.mse_loss, lambda p: LARS(p, lr=0.1), method)


@pytest.mark.parametrize("method", ["1f1b", "pb(predict=weight)"])
def test_stages_of_their_own_optimizers_train_as_one_would(method):
    """Ratios are a layer's own, so cutting a network into stages changes nothing; delay 0 on one stage."""
    import stretto

    def network():
        torch.manual_seed(0)
        return [nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 4, dtype=torch.float64)]

    stages = network() if method == "1f1b" else [nn.Sequential(*network())]
    trainer = stretto.Trainer(stages, nn.functional.mse_loss, lambda p: LARS(p, lr=5.0, weight_decay=0.1), method)
    alone = nn.Sequential(*network())
    optimizer = LARS(alone.parameters(), lr=5.0, weight_decay=0.1)
    for step in range(10):
        x = torch.sin(torch.arange(48, dtype=torch.float64) + step).view(8, 6)
        trainer.step(x, x[:, :4])
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), x[:, :4]).backward()
        optimizer.step()
    trainer.flush()
    for mine, theirs in zip(trainer.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
