"""Cosines against gradients taken by hand, one graph a loss, and what they must be by definition."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, state
from pairwise import in_turn
from stretto.analysis.gradient_cosine import alignment
from stretto.errors import UsageError

SGD = torch.optim.SGD
TRAINED_BY = {  # by stage: the stages whose losses train it
    "backprop": [[3], [3], [3], [3]],
    "greedy": [[0], [1], [2], [3]],
    "overlapping": [[1], [1, 2], [2, 3], [3]],
    "chunked": [[1], [1], [3], [3]],
}
STOPS = {"backprop": {3: 0}, "greedy": {0: 0, 1: 1, 2: 2, 3: 3}, "overlapping": {1: 0, 2: 1, 3: 2},
         "chunked": {1: 0, 3: 2}}  # fmt: skip


def made(name, method):
    network = NETWORKS[name]
    batches = network.batches(2)
    return stretto.Trainer(network.stages(4), network.loss, lambda p: SGD(p, lr=0.1), method, example=batches[0][0]), [
        *batches,
        (batches[0][0][:2], batches[0][1][:2]),  # batches of several sizes
    ]


def by_hand(stages, heads, method, loss, batches):
    """Cosines and head losses from sums over examples, in numpy."""
    modules = nn.ModuleList([m for m in (*stages, *heads) if m is not None])
    modules.eval()

    def gradient(head, stop):
        total, value = 0, 0.0
        for x, y in batches:
            values = x if isinstance(x, tuple) else (x,)
            for number, stage in enumerate(stages[: head + 1]):
                values = [each.detach() for each in values] if number == stop else values
                values = stage(*values)
                values = values if isinstance(values, tuple) else (values,)
            output = values[0] if heads[head] is None else heads[head](*values)
            each = loss(output, y) * len(y)
            modules.zero_grad()
            each.backward()
            value += each.item()
            found = [[np.zeros(p.shape) if p.grad is None else p.grad.numpy() for p in s.parameters()] for s in stages]
            flat = [np.concatenate([g.ravel() for g in own]) if own else np.zeros(0) for own in found]
            total = flat if total == 0 else [a + b for a, b in zip(total, flat, strict=True)]
        modules.zero_grad()
        return total, value / sum(len(y) for _, y in batches)

    whole, _ = gradient(3, 0)
    own = {head: gradient(head, stop) for head, stop in STOPS[method].items()}
    cosines = []
    for stage, trained_by in enumerate(TRAINED_BY[method]):
        local = sum(own[head][0][stage] for head in trained_by)
        cosines.append(local @ whole[stage] / np.linalg.norm(local) / np.linalg.norm(whole[stage]))
    return cosines, [own[head][1] if head in own else None for head in range(4)]


@pytest.mark.parametrize(("name", "method"), in_turn([*NETWORKS], [*TRAINED_BY], rounds=len(TRAINED_BY), slow=3))
def test_cosines_are_those_of_plain_gradients(name, method):
    trainer, batches = made(name, method)
    loss = NETWORKS[name].loss
    wanted, losses = by_hand(*copy.deepcopy((trainer.stages, trainer.heads)), method, loss, batches)
    before = {key: value.clone() for key, value in state([*trainer.stages, *trainer.heads]).items()}
    found = alignment(trainer.stages, trainer.heads, trainer.rules.reach, loss, batches)
    assert found.cosines == pytest.approx(wanted, abs=1e-10)
    assert found.losses == pytest.approx(losses, abs=1e-12)
    after = state([*trainer.stages, *trainer.heads])
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(p.grad is None for stage in trainer.stages for p in stage.parameters())
    ones = {"backprop": [0, 1, 2, 3], "greedy": [3], "overlapping": [3], "chunked": [2, 3]}[method]
    assert [found.cosines[stage] for stage in ones] == pytest.approx([1.0] * len(ones), abs=1e-12)
    assert all(found.cosines[stage] < 1 - 1e-6 for stage in range(4) if stage not in ones)


def test_stages_without_a_gradient_have_no_cosine():
    stages = [nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)]
    nn.init.zeros_(stages[2].weight)
    trainer = stretto.Trainer(stages, cross_entropy, lambda p: SGD(p, lr=0.1), "backprop")
    batch = torch.randn(5, 3), torch.randint(2, (5,))
    found = alignment(trainer.stages, trainer.heads, trainer.rules.reach, cross_entropy, [batch])
    assert found.cosines[:2] == (None, None)
    assert found.cosines[2] == pytest.approx(1)
    with pytest.raises(UsageError, match="alignment got no examples"):
        alignment(trainer.stages, trainer.heads, trainer.rules.reach, cross_entropy, [])
