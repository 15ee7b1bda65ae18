"""SOAP and Lion by their papers' equations, in numpy."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto.optim import SOAP, Lion

RATES = [0.02, 0.02, 0.01, 0.03, 0.03, 0.01, 0.02]


def gradients(shape):
    generator = np.random.default_rng(3)
    factor = generator.normal(size=(shape[0], shape[0]))
    return [factor @ generator.normal(size=(shape[0], int(np.prod(shape[1:])))) for _ in RATES]


def stepped(kind, weights, shape, steps, *, first=None, **options):
    """The weights after all steps; `first` gets a copy of the state after the first one."""
    parameter = nn.Parameter(torch.tensor(weights).reshape(shape))
    optimizer = kind([parameter], **options)
    for rate, gradient in zip(RATES, steps, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.tensor(gradient).reshape(shape)
        optimizer.step()
        if first is not None and not first:
            first.update(deepcopy(optimizer.state[parameter]))
    return parameter.detach().numpy().reshape(weights.shape)


def lion(w, steps, b1, b2, decay):
    m = np.zeros_like(w)
    for rate, g in zip(RATES, steps, strict=True):
        w = w - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * w)
        m = b2 * m + (1 - b2) * g
    return w


def soap(w, steps, b1, b2, *, eps, decay, every, sides=(True, True), bases=None):
    """Algorithm 3, with Adam's corrections of the bias; the first gradient only gives the basis."""
    (rows, columns), m, v, first = w.shape, np.zeros_like(w), np.zeros_like(w), steps[0]
    left, right = (1 - b2) * first @ first.T, (1 - b2) * first.T @ first
    ql = np.linalg.eigh(left)[1][:, ::-1] if sides[0] else np.eye(rows)
    qr = np.linalg.eigh(right)[1][:, ::-1] if sides[1] else np.eye(columns)
    ql, qr = (ql, qr) if bases is None else bases
    for t, (rate, g) in enumerate(zip(RATES[1:], steps[1:], strict=True), 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (ql.T @ g @ qr) ** 2
        rotated = (ql.T @ m @ qr / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - rate * (ql @ rotated @ qr.T + decay * w)
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        if t % every == 0:
            ql = np.linalg.qr(left @ ql)[0] if sides[0] else ql
            qr = np.linalg.qr(right @ qr)[0] if sides[1] else qr
    return w


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion(decay):
    w, steps = np.random.default_rng(0).normal(size=(3, 4)), gradients((3, 4))
    expected = lion(w, steps, 0.9, 0.99, decay)
    np.testing.assert_allclose(stepped(Lion, w, (3, 4), steps, weight_decay=decay), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (2, 3, 1, 1)])
@pytest.mark.parametrize("every", [1, 3])
def test_soap(shape, every):
    w = np.random.default_rng(0).normal(size=(shape[0], int(np.prod(shape[1:]))))
    steps = gradients(shape)
    given = {"eps": 1e-6, "weight_decay": 0.1, "every": every, "betas": (0.9, 0.8)}
    expected = soap(w, steps, 0.9, 0.8, eps=1e-6, decay=0.1, every=every)
    np.testing.assert_allclose(stepped(SOAP, w, shape, steps, **given), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(5, 2), (2, 3, 2, 1)])
def test_soap_where_many_eigenvectors_belong_to_zero(shape):
    """Which basis of that space LAPACK gives is not determined: the reference takes it over."""
    w = np.random.default_rng(0).normal(size=(shape[0], int(np.prod(shape[1:]))))
    steps, first = gradients(shape), {}
    given = {"eps": 1e-6, "weight_decay": 0.1, "every": 2, "betas": (0.9, 0.8)}
    found = stepped(SOAP, w, shape, steps, first=first, **given)
    bases = [first[f"{side}_basis"].numpy() for side in ("left", "right")]
    for basis, correlation in zip(bases, (steps[0] @ steps[0].T, steps[0].T @ steps[0]), strict=True):
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-12)
        diagonal = basis.T @ correlation @ basis
        np.testing.assert_allclose(diagonal, np.diag(np.diag(diagonal)), atol=1e-12)
        assert (np.diff(np.diag(diagonal)) <= 1e-12).all()
    expected = soap(w, steps, 0.9, 0.8, eps=1e-6, decay=0.1, every=2, bases=bases)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_eigenvectors_that_are_no_numbers_are_found_in_float64(monkeypatch):
    """As MKL's of a sound float32 matrix of rank 45 of 106: the first step of `--optimizer soap` on text."""
    whole = torch.linalg.eigh

    def in_float64_alone(matrix):
        return whole(matrix) if matrix.dtype == torch.float64 else (matrix[0], torch.full_like(matrix, torch.nan))

    monkeypatch.setattr(torch.linalg, "eigh", in_float64_alone)
    weights, gradient = torch.nn.Parameter(torch.zeros(4, 3)), torch.randn(4, 3)
    optimizer = SOAP([weights], lr=0.1)
    for _ in range(3):
        weights.grad = gradient.clone()
        optimizer.step()
    assert weights.isfinite().all()
    assert weights.dtype == torch.float32
    assert (weights * gradient).sum() < 0


def test_soap_leaves_large_sides_alone():
    w, steps = np.random.default_rng(0).normal(size=(5, 3)), gradients((5, 3))
    given = {"eps": 1e-6, "weight_decay": 0.0, "every": 2, "betas": (0.9, 0.8), "largest": 4}
    expected = soap(w, steps, 0.9, 0.8, eps=1e-6, decay=0.0, every=2, sides=(False, True))
    np.testing.assert_allclose(stepped(SOAP, w, (5, 3), steps, **given), expected, rtol=0, atol=1e-10)


def test_soap_of_vectors_is_adamw():
    results = []
    for kind in (SOAP, torch.optim.AdamW):
        parameter = nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
        optimizer = kind([parameter], lr=0.1, betas=(0.9, 0.8), weight_decay=0.2)
        for step in range(5):
            parameter.grad = torch.cos(parameter.detach() * step)
            optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Lion, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: choose a value"),
        (Lion, {"lr": "fast"}, "lr='fast'"),
        (SOAP, {"every": 0}, "every=0"),
        (SOAP, {"betas": 0.9}, "betas=0.9"),
    ],
)
def test_mistakes(kind, given, message):
    with pytest.raises(stretto.UsageError, match=message):
        kind([nn.Parameter(torch.ones(2, 2))], **given)


def test_soap_wants_digits():
    with pytest.raises(stretto.UsageError, match=r"too few digits for eigenvectors.*precision='bf16'"):
        SOAP([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])
