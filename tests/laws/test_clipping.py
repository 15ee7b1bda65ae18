"""Clipping by the global norm: exact where training is synchronous, within the limit where it is not."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, assert_equal, run

LIMIT = 0.05
SYNCHRONOUS = ["backprop", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "gpipe(microbatches=3)"]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_clipped(stages, loss, batches):
    """Plain PyTorch; and how often the limit was passed."""
    model = nn.ModuleList(copy.deepcopy(list(stages))).train()
    optimizer, passed = sgd(list(model.parameters())), 0
    for x, y in batches:
        optimizer.zero_grad()
        loss(run(model, x), y).backward()
        passed += bool(nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT)
        optimizer.step()
    return model, passed


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("method", SYNCHRONOUS)
def test_synchronous_methods_clip_as_plain_pytorch(method, workers):
    network = NETWORKS["mlp"]
    stages, batches = network.stages(4), network.batches(8)
    expected, passed = train_clipped(stages, network.loss, batches)
    assert passed == 8
    trainer = stretto.Trainer(stages, network.loss, sgd, method, clip=LIMIT, workers=workers)
    for x, y in batches:
        trainer.step(x, y)
    assert_equal(trainer.stages, expected, 0.0 if method == "backprop" else 1e-12)


def test_the_phases_of_an_asynchronous_method_clip_as_plain_pytorch():
    network = NETWORKS["mlp"]
    stages, batches = network.stages(4), network.batches(8)
    expected, _ = train_clipped(stages, network.loss, batches)
    trainer = stretto.Trainer(stages, network.loss, sgd, "pb(warmup=8)", clip=LIMIT)
    for x, y in batches:
        trainer.step(x, y)
    assert_equal(trainer.stages, expected)


@pytest.mark.parametrize("method", ["pb", "pipedream", "paci(every=2)", "greedy"])
def test_elsewhere_every_stage_keeps_to_its_share(method):
    """A first update moves a stage by its gradient: at most LIMIT / sqrt(S), reached when clipped."""
    network = NETWORKS["mlp"]
    stages, (batch,) = network.stages(4), network.batches(1)
    before = copy.deepcopy(stages)
    trainer = stretto.Trainer(
        stages, network.loss, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), method, clip=LIMIT, example=batch[0]
    )
    trainer.step(*batch)
    trainer.flush()
    for stage, old in zip(stages, before, strict=True):
        moved = math.sqrt(
            sum(
                float((p - q).detach().square().sum())
                for p, q in zip(stage.parameters(), old.parameters(), strict=True)
            )
        )
        assert moved <= LIMIT / 2 * (1 + 1e-6)
        assert method == "greedy" or moved == pytest.approx(LIMIT / 2, rel=1e-4)


def test_a_stage_without_weights_has_nothing_to_tell():
    network = NETWORKS["mlp"]
    stages = [*network.stages(2), nn.Identity()]
    trainer = stretto.Trainer([stages[0], nn.Tanh(), stages[1]], network.loss, sgd, "1f1b(microbatches=2)", clip=LIMIT)
    (batch,) = network.batches(1)
    assert trainer.step(*batch) is not None


@pytest.mark.parametrize("clip", [0, -1.0, True, "1", math.nan])
def test_no_limit_at_all_is_none(clip):
    with pytest.raises(stretto.UsageError, match="clip="):
        stretto.Trainer([nn.Linear(2, 2)], cross_entropy, sgd, clip=clip)
