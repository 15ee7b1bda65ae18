"""Exchanges of processes that share weights: those counted are those that torch.distributed is asked for."""

from collections import Counter
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pairwise import slow_where
from stretto.measure import layer_costs
from stretto.measure.tensor_costs import tensor_costs
from stretto.models.transformer import language_model
from stretto.parallel.operator import tensor

BATCH = 6


def perceptron():
    return [nn.Sequential(nn.Linear(8, 12), nn.ReLU()), nn.Linear(12, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 5))]


def convolutions():
    return [nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), nn.Flatten(1)]


def transformer(depth=1):
    return [make() for make in language_model(20, 6, depth=depth, width=16, heads=2)]


MODELS = {
    "perceptron": (perceptron, torch.zeros(BATCH, 8)),
    "convolutions": (convolutions, torch.zeros(BATCH, 3, 9, 9)),
    "transformer": (transformer, torch.zeros(BATCH, 6, dtype=torch.long)),
    "two blocks": (partial(transformer, depth=2), torch.zeros(BATCH, 6, dtype=torch.long)),
}


@cache
def costs_of(name):
    """Of the first of two processes."""
    make, x = MODELS[name]
    return tensor_costs(make(), x, 2)


@pytest.fixture
def mesh():
    """The first of two processes, of which the other one is made up: its messages come at once."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def asked_for(monkeypatch, mesh, layers, x):
    """What a forward and a backward of a cut model ask torch.distributed for: (calls, bytes) of sums and of wholes."""
    module = tensor(nn.Sequential(*layers), mesh, parameters="local")
    calls, sizes = Counter(), Counter()

    def counted(name, nbytes):
        original = getattr(dist, name)

        def call(*given, **options):
            calls[name] += 1
            sizes[name] += nbytes(given)
            return original(*given, **options)

        monkeypatch.setattr(dist, name, call)

    counted("all_reduce", lambda given: given[0].nbytes)
    counted("all_gather", lambda given: sum(part.nbytes for part in given[0]))
    module(x).sum().backward()
    monkeypatch.undo()
    return calls, sizes


@pytest.mark.parametrize("name", slow_where(lambda name: name == "two blocks", MODELS))
def test_counted_exchanges_are_those_of_a_step(mesh, monkeypatch, name):
    make, x = MODELS[name]
    costs = costs_of(name)
    calls, sizes = asked_for(monkeypatch, mesh, make(), x)
    for ours, theirs in (("tensor-sum", "all_reduce"), ("tensor-gather", "all_gather")):
        works = [
            work for row in costs.layers for work in (*row.forward_exchanges, *row.backward_exchanges)
            if work.operator == ours
        ]  # fmt: skip
        assert sum(work.calls for work in works) == calls[theirs], ours
        padded = x.size(0) * 4 if name == "perceptron" and theirs == "all_gather" else 0  # 5 outputs travel as 3 and 3
        assert sum(work.bytes.at(BATCH) for work in works) + padded == pytest.approx(sizes[theirs]), ours
    assert calls["all_reduce"] > 0


@pytest.mark.parametrize("name", slow_where(lambda name: name not in ("perceptron", "convolutions"), MODELS))
def test_a_process_has_about_half_of_the_work(name):
    make, x = MODELS[name]
    part, whole = costs_of(name).whole, layer_costs(make(), x).whole
    assert 0.4 < part.flops().at(BATCH) / whole.flops().at(BATCH) < 0.65
    assert 0.45 < part.parameters / whole.parameters < 0.7
    assert part.forward_exchanges
    assert whole.forward_exchanges is None
