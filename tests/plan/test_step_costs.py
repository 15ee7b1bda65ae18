"""What cures and optimizers add to a step: plans, forecasts, schedules and a Trainer say the same of it."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from test_refine import calibrated
from torch import nn
from torch.nn.functional import cross_entropy

from forecasts import forecast
from stretto import Trainer
from stretto.cli.show import facts_of, lay_out
from stretto.cost import find_cluster
from stretto.cost.stage_prediction import Machine, matrix_seconds, stage_times
from stretto.errors import UsageError
from stretto.measure import layer_costs
from stretto.mesh import Mesh
from stretto.methods import StageAt, method
from stretto.optim.by_name import make_optimizer
from stretto.optimizers import OPTIMIZERS
from stretto.plan import Problem, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.planned_methods import planned
from stretto.plan.refine import refined
from stretto.plan.search_space import Candidate
from stretto.simulate import simulate

WORDS, TOKENS, BATCH, BOUNDS = 40, 3, 6, (0, 2, 6)
COMBINED = [
    ("pipedream", "lion"), ("pipedream", "soap"), ("pb(predict=step)", "muon"), ("pipedream-2bw(feedback=2)", "muon"),
    ("pipedream(rotate=True, refresh=4)", "adamw"), ("pb(rotate=one-sided, feedback=delay)", "adam"),
]  # fmt: skip


def layers():
    """An embedding, hidden matrices, a kernel, a norm, and an output layer."""
    torch.manual_seed(0)
    return [nn.Embedding(WORDS, 8), nn.Linear(8, 12), nn.Conv1d(TOKENS, TOKENS, 3, padding=1), nn.LayerNorm(12),
            nn.Sequential(nn.Linear(12, 6), nn.Flatten()), nn.Linear(6 * TOKENS, WORDS)]  # fmt: skip


@cache
def costs():
    x, y = torch.randint(WORDS, (2, TOKENS)), torch.randint(WORDS, (2,))
    return layer_costs(layers(), x, loss=cross_entropy, target=y)


def problem(name, optimizer, **changes):
    return Problem(
        costs=costs(), cluster=calibrated(2), workers=2, batch_sizes=(BATCH,), methods=(name,),
        optimizer=optimizer, all_workers=True, pipelines=(2,), begins=BOUNDS[:-1], stages=(2,), recompute=("none",),
        shards=("none",), spaces=((1, 1),), **changes,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "optimizer"), COMBINED)
def test_all_say_the_same(name, optimizer):
    given = problem(name, optimizer)
    found = search(given)
    (closed,) = found.plans
    (plan,) = refined([closed], found.prices)
    c, bounds = plan.candidate, (0, 2, 7)  # the loss is the last layer
    told = forecast(given.costs, bounds, given.cluster, str(c), BATCH, workers=2, optimizer=optimizer)
    assert (plan.seconds, plan.bytes) == (told.seconds, told.bytes)

    layout = lay_out(str(c), 2, 2, None)
    cures = [planned(name).step_cure(c.stage_at(s)) for s in range(2)]
    assert cures == list(layout.method.step_cures(layout.schedule))
    shown = facts_of(layout, simulate(layout.schedule, layout.rules, layout.turns))
    assert shown["feedback"] == [cure.feedback for cure in cures]
    assert shown["refresh_intervals"] == [cure.interval for cure in cures if cure.interval is not None]

    trainer = trained(str(c), optimizer)
    tables = found.prices.stages_at(c, plan.bounds)
    times = stage_times(
        given.costs, bounds, given.cluster, c.examples, optimizer=optimizer,
        cures=layout.method.step_cures(layout.schedule),
    )  # fmt: skip
    versions = layout.method.versions(layout.schedule)
    for s, (seconds, table) in enumerate(zip(times, tables, strict=True)):
        copies = sum(layout.method.weight_copies(layout.schedule)[s])
        assert copies == (name == "pb(predict=step)" and s == 0)
        weights = versions[s] * given.costs.stages(bounds)[s].parameter_bytes
        assert table.static_bytes - weights - (1 + copies) * seconds.gradients == state_of(trainer.optimizers[s])
        copied = found.prices.places_of(c).workers.copy_seconds(s, seconds.gradients) * (versions[s] > 1)
        assert float(table.update) == pytest.approx(seconds.compute.update + copied)


def trained(name, optimizer):
    """A Trainer after some steps."""
    modules = layers()
    stages = [nn.Sequential(*modules[i:j]) for i, j in pairwise(BOUNDS)]
    x, y = torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH,))
    make = make_optimizer(optimizer, 1e-3, None, 0.0)
    trainer = Trainer(stages, cross_entropy, make, name, example=x)
    for _ in range(4):
        trainer.step(x, y)
    trainer.flush()
    return trainer


def state_of(optimizer):
    """Bytes of an optimizer's state, numbers apart."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(
        value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor) and value.dim()
    )


@pytest.mark.parametrize("name", ["pb", "paci", "pipedream", "pipedream-2bw"])
def test_bases_are_refreshed_as_often_in_plans_as_in_training(name):
    known = planned(f"{name}(rotate=True, feedback=delay)")
    for stages, count in ((1, 1), (2, 2), (3, 3), (5, 8)):
        cut = {known.planning.cut: count} if known.planning.cut else {}
        chosen = method(name, rotate=True, feedback="delay", **cut)
        told = chosen.step_cures(chosen.schedule(stages, stages))
        for s, cure in enumerate(told):
            closed = known.step_cure(StageAt(s, stages, count))
            assert (closed.interval, closed.feedback) == (cure.interval, pytest.approx(cure.feedback))


def test_a_rotation_costs_more_with_shorter_intervals_and_both_sides():
    names = ("pipedream", "pipedream(rotate=one-sided)", "pipedream(rotate=True)", "pipedream(rotate=True, refresh=1)")
    updates = []
    for name in names:
        found = search(problem(name, "adamw"))
        (plan,) = found.plans
        updates.append(float(found.prices.stages_at(plan.candidate, plan.bounds)[0].update))
    assert updates == sorted(set(updates))
    among = search(problem(names[1], "adamw").but(methods=names))
    assert str(among.plans[0].candidate) == "pipedream"  # the fastest of them; a loss may choose another


def test_rotations_and_shared_weights_do_not_go_together():
    with pytest.raises(
        UsageError, match=r"tensors lists 2, but method 'pipedream\(rotate=True\)' turns whole matrices"
    ):
        problem("pipedream(rotate=True)", "adamw", tensors=(2,))
    both = problem("pipedream(rotate=True)", "adamw", tensors=(1, 2))
    found = search(both.but(pipelines=(1, 2), begins=None, stages=None))
    assert {plan.candidate.mesh.tensor for plan in found.plans} == {1}


def test_replicas_that_shard_weights_all_orthogonalise_every_matrix():
    """Beside an axis of two replicas a step of AdamW takes half as long, and Muon's products as long as ever."""
    bundled, wide = find_cluster("8-a100"), 2048
    devices = {name: replace(device, variation=None) for name, device in bundled.devices.items()}
    cluster = replace(bundled, devices=devices)  # no worker waits for a slower one
    table = layer_costs([nn.Linear(wide, wide, bias=False), nn.Linear(wide, 2)], torch.zeros(2, wide), fake=True)
    updates = {}
    for optimizer in ("adamw", "muon"):
        asked = Problem(costs=table, cluster=cluster, workers=2, batch_sizes=(BATCH,), optimizer=optimizer)
        prices = Prices(asked)
        for shard in ("none", "fully-shard"):
            c = Candidate(1, Mesh(data=2), BATCH, shard=shard)
            updates[optimizer, shard] = float(prices.stages_at(c, (0, 2))[0].update)
    products = matrix_seconds(table.layers[0], OPTIMIZERS["muon"], Machine(cluster.device(0), "float32"))
    passes = updates["muon", "none"] - products
    assert passes == pytest.approx(updates["adamw", "none"])
    gathered = updates["muon", "fully-shard"] - updates["adamw", "fully-shard"] - products
    assert 0 < gathered < 4 * wide**2 / 1e9  # a matrix over links of 100 GB/s and more
