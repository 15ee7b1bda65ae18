"""Shares of a stage's elements: every element is in one of them, and they are equal."""

import random

import pytest
import torch

import stretto
from stretto.replicas.optimizer_share import BLOCK, Shares


def drawn(seed):
    dice = random.Random(seed)
    shapes = [tuple(dice.randint(1, 40) for _ in range(dice.randint(0, 3))) for _ in range(dice.randint(1, 9))]
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape in shapes], dice.randint(2, 5)


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_share(seed, elementwise):
    tensors, replicas = drawn(seed)
    shares = Shares(tensors, replicas, elementwise=elementwise)
    marked = [torch.zeros_like(tensor) for tensor in tensors]
    sizes = []
    for replica in range(replicas):
        views = shares.views(marked, replica)
        for view in views:
            view += 1
        sizes.append(sum(view.numel() for view in views))
        assert len({each.parameter for each in shares.of(replica)}) == len(shares.of(replica))
    assert all((tensor == 1).all() for tensor in marked)
    total, largest = sum(sizes), max(tensor.numel() for tensor in tensors)
    if elementwise:
        assert max(sizes) <= total / replicas + BLOCK
    else:
        assert max(sizes) <= total / replicas + largest
        assert all(shares.is_whole(each) for replica in range(replicas) for each in shares.of(replica))


def test_what_does_not_lie_in_order_stays_whole():
    tensors = [torch.zeros(8, 8, 3, 3).to(memory_format=torch.channels_last), torch.zeros(1000)]
    shares = Shares(tensors, 2, elementwise=True)
    found = [each for replica in (0, 1) for each in shares.of(replica) if each.parameter == 0]
    assert len(found) == 1
    assert shares.is_whole(found[0])


@pytest.mark.parametrize("seed", range(5))
def test_norms_are_those_of_whole_gradients(seed):
    """A gradient in one share has its own norm, to the last bit; one that is missing has none."""
    tensors, replicas = drawn(seed)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters[1:]:
        parameter.grad = torch.randn_like(parameter)
    shares = Shares(parameters, replicas, elementwise=True)
    found = shares.norms(parameters[1:])
    assert len(found) == len(parameters) - 1
    for number, (parameter, norm) in enumerate(zip(parameters[1:], found, strict=True), start=1):
        assert norm == pytest.approx(float(parameter.grad.norm()), rel=1e-6)
        if any(each.parameter == number and shares.is_whole(each) for r in range(replicas) for each in shares.of(r)):
            assert norm == torch.linalg.vector_norm(parameter.grad.reshape(-1))


def test_an_optimizer_of_other_parameters_is_refused():
    from stretto.replicas.optimizer_share import groups_of

    own, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    assert groups_of(torch.optim.SGD([own]), [other, own]) == [[1]]
    with pytest.raises(stretto.UsageError, match="steps parameters that it was not given"):
        groups_of(torch.optim.SGD([own, other]), [own])
