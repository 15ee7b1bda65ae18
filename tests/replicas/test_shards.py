"""Weights in shards: cut, stepped, and what of them is told."""

import pytest
import torch
from torch import nn

from stretto.errors import UsageError
from stretto.optim import LAMB
from stretto.replicas.parameter_server.shard import Cut, Shard, piece_of, take


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in ((5, 2000), (7,), (3, 3), ())]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1), None


def test_large_ones_are_cut_by_rows_and_small_ones_are_whole():
    parameters = tensors()
    cut = Cut(parameters, 2, torch.optim.SGD(parameters[:1], lr=0.1))
    assert cut.rows(0) == [(0, 3), (0, 0), (0, 0), (0, 0)]
    assert cut.rows(1) == [(3, 5), (0, 7), (0, 3), (0, 1)]
    assert cut.used == [True, True]


def test_an_optimizer_that_looks_at_whole_tensors_gets_them():
    parameters = [nn.Parameter(each) for each in tensors()]
    cut = Cut(parameters, 2, LAMB(parameters, lr=0.1))
    assert cut.rows(0) == [(0, 5), (0, 0), (0, 0), (0, 0)]
    assert cut.rows(1) == [(0, 0), (0, 7), (0, 3), (0, 1)]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_together_step_as_one_optimizer(shards):
    ours, plain = tensors(), [nn.Parameter(each) for each in tensors()]
    optimizer = torch.optim.Adam(plain, lr=0.1)
    cut = Cut(ours, shards, optimizer)
    servers = [
        Shard(cut.pieces(ours, shard), 1, lambda own: (torch.optim.Adam(own, lr=0.1), None)) for shard in range(shards)
    ]
    for n in range(3):
        gradients = [each * n for each in tensors()]
        gradients[1] = None
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        for shard, server in enumerate(servers):
            take(ours, cut.rows(shard), server.update(0, cut.pieces(gradients, shard)))
        assert all(torch.equal(mine, each) for mine, each in zip(ours, plain, strict=True))


def sparse(rows, size=6):
    return torch.sparse_coo_tensor([rows], torch.ones(len(rows), 2), (size, 2), check_invariants=True)


def test_of_sparse_gradients_only_rows_are_told():
    """Replica 1 hears of what replica 0 changed, too, and of nothing twice."""
    shard = Shard([torch.zeros(6, 2)], 2, sgd)
    (change,) = shard.update(0, [piece_of(sparse([1, 4, 1]), 0, 6)])
    assert change[0].tolist() == [1, 4]
    assert torch.allclose(change[1], torch.tensor([[-0.2, -0.2], [-0.1, -0.1]]))
    (change,) = shard.update(1, [piece_of(sparse([5]), 0, 6)])
    assert change[0].tolist() == [1, 4, 5]
    assert shard.changes(1) == (None,)
    (change,) = shard.changes(0)
    assert change[0].tolist() == [5]
    (change,) = shard.update(0, [torch.ones(6, 2)])
    assert change.shape == (6, 2)


def test_momentum_moves_rows_without_a_gradient():
    shard = Shard([torch.zeros(6, 2)], 1, lambda own: (torch.optim.SGD(own, lr=0.1, momentum=0.9), None))
    (change,) = shard.update(0, [piece_of(sparse([1]), 0, 6)])
    assert change.shape == (6, 2)


def test_rows_of_a_sparse_gradient():
    rows, values = piece_of(sparse([0, 5, 3, 3]), 2, 6)
    assert rows.tolist() == [1, 3]
    assert values.tolist() == [[2, 2], [1, 1]]
    with pytest.raises(UsageError, match="sparse in 2 dimensions"):
        piece_of(torch.eye(3).to_sparse(), 0, 3)
