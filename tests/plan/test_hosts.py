"""Devices that wait for hosts: against kernels one by one; tables against single stages; plans against simulations."""

import random
from dataclasses import replace

import numpy as np
import pytest

from stretto.cost import find_cluster, stage_times
from stretto.cost.layer_sums import LayerParts, LayerTimes, forward_lags, host_lags, stage_of
from stretto.mesh import Mesh
from stretto.plan import Objective, Problem, candidates, search
from stretto.plan.bound import Bounds
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.programs import program_named
from stretto.plan.refine import refined, terms
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import CostRequest, TensorFormat, costed

SIZES = {"depth": 3, "width": 64, "heads": 4, "context": 32, "vocabulary": 64}
KERNELS = 1000  # of each layer


def one_by_one(layers):
    """Seconds until a device has run all kernels of the layers (d, h), each once its host has issued it."""
    issued = ended = 0.0
    for device, host in layers:
        for _ in range(KERNELS):
            issued += host / KERNELS
            ended = max(ended, issued) + device / KERNELS
    return ended


def drawn(seed, layers):
    chosen = random.Random(seed)
    return [(chosen.choice((0.0, chosen.uniform(0, 2))), chosen.uniform(0, 2)) for _ in range(layers)]


@pytest.mark.parametrize("seed", range(6))
def test_a_device_is_done_when_its_kernels_are_one_by_one(seed):
    layers = drawn(seed, 4)
    predicted = sum(device for device, _ in layers) + forward_lags(*np.array(layers).T)[0, -1]
    assert predicted == pytest.approx(one_by_one(layers), abs=2.1 / KERNELS)
    assert predicted >= sum(host for _, host in layers) - 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_a_backward_that_follows_its_forward_finds_its_host_ahead(seed):
    parts = parts_of(seed, 4)
    whole, part = (stage_of(parts, is_whole=each, start=0, step=0) for each in (True, False))
    forward = [(part.device.forward, part.host.forward) for part in parts]
    backward = [(part.device.backward, part.host.backward) for part in reversed(parts)]
    assert whole.forward + whole.backward == pytest.approx(one_by_one(forward + backward), abs=2.1 / KERNELS)
    assert whole.backward <= part.backward


def parts_of(seed, layers):
    """Layers of random seconds, of which some have no weights; a W takes no longer than its B."""
    parts = []
    for layer, seconds in enumerate(drawn(seed + 10 * each, 4) for each in range(layers)):
        (forward, backward, inputs, update), trains = seconds, (seed + layer) % 3 > 0
        sides = []
        for side in range(2):
            weight = 0.5 * backward[side] + 0.1 if trains else 0.0
            sides.append(LayerTimes(forward[side], backward[side], inputs[side], weight, update[side] * trains, 0.0))
        parts.append(LayerParts(*sides))
    return parts


def lag(layers):
    """How long a device waits for its host in an action of these layers, in the order in which they run: (d, h)."""
    longest = ahead = 0.0
    for device, host in layers:
        ahead += host - device
        longest = max(longest, ahead)
    return longest


@pytest.mark.parametrize("seed", range(4))
def test_tables_have_the_lags_of_every_stage(seed):
    """W is a whole backward above the lowest layer with weights."""
    parts, layers = parts_of(seed, 6), 6
    lags = host_lags(*(LayerTimes(*np.array(side).T) for side in zip(*parts, strict=True)))
    assert lags is not None

    def seconds(kind, among):
        return [(getattr(part.device, kind), getattr(part.host, kind)) for part in among]

    for i in range(layers):
        for j in range(i + 1, layers + 1):
            own = parts[i:j]
            trained = [part for k, part in enumerate(own) if any(each.device.weight_gradient for each in own[: k + 1])]
            weights = [*reversed(seconds("backward", trained[1:])), *seconds("weight_gradient", trained[:1])]
            found = [float(table[i, j]) for table in lags]
            told = [lag(seconds("forward", own)), *(lag(reversed(seconds(kind, own)))
                    for kind in ("backward", "input_gradient")), lag(weights)]  # fmt: skip
            assert found[:4] == pytest.approx(told, abs=1e-12)
            assert found[4:] == pytest.approx([sum(part.host.forward for part in own), sum(p.host.update for p in own)])


@pytest.fixture(scope="module")
def model():
    asked = CostRequest(heads=(), sharing=(2,), format=TensorFormat("bfloat16"))
    return costed(TrainSettings(model="decoder", model_options=SIZES, optimizer="adam"), asked)


def problem(model, program, cluster="8-a100", **changes):
    chosen = {"tensors": (1,), "data_parallels": (1,), "pipelines": (1,), "microbatches": (1,), "methods": ("1f1b",)}
    found = find_cluster(cluster)
    return Problem(costs=model.costs, cluster=found, workers=1, batch_sizes=(8,), optimizer="adam", masters=True,
                   tensor_costs=model.tensor_costs, form_costs=model.form_costs, recompute=("none",),
                   sequences=(False,), spaces=((1, 1),), shards=("none",), all_workers=True, weight_products=True,
                   program=program_named(program), **chosen | changes)  # fmt: skip


def test_a_small_network_waits_for_its_host_and_one_without_a_host_does_not(model):
    cluster = find_cluster("8-a100")
    device = cluster.devices["a100"]
    free = replace(cluster, devices={"a100": replace(device, attained=device.attained.without_host())})
    steps = []
    for given in (cluster, free):
        prices = Prices(problem(model, "torch").but(cluster=given))
        (c,) = candidates(prices.problem)
        plan = plan_of(c, Objective(), prices)
        steps.append(plan.formula)
        parts = terms(plan, prices)
        assert sum(parts.values()) == pytest.approx(plan.formula)
        assert (parts["host"] > 0.5 * plan.formula) == (given is cluster)
        assert bool(parts["host"]) == (given is cluster)
    assert steps[1] < steps[0] / 2
    (stage,) = stage_times(model.costs, (0, len(model.costs.layers)), cluster, 8, optimizer=prices.steps.stepping)
    assert steps[0] == pytest.approx(stage.compute.forward + stage.compute.backward + stage.compute.update, rel=0.02)


@pytest.mark.parametrize(
    ("pipeline", "tensor", "method"), [(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "gpipe"), (2, 1, "zb-h1")]
)
def test_closed_forms_are_the_schedules_times_and_bounds_stay_below(model, pipeline, tensor, method):
    asked = problem(model, "torch", pipelines=(pipeline,), tensors=(tensor,), microbatches=(4,), methods=(method,))
    prices = Prices(asked.but(workers=pipeline * tensor))
    for c in candidates(prices.problem):
        plan = plan_of(c, Objective(), prices)
        bounds = Bounds(prices)
        assert bounds.seconds(c) <= plan.formula
        assert bounds.tighter(c) <= plan.formula
        assert 0.9 * plan.formula <= refined([plan], prices)[0].seconds <= plan.formula * (1 + 1e-9)
        assert terms(plan, prices)["host"] > 0


def test_the_search_agrees_with_all_candidates_where_hosts_are_waited_for(model):
    asked = problem(model, "torch", pipelines=None, data_parallels=None, microbatches=None).but(workers=4)
    found = search(asked, Objective(), keep=1)
    prices = Prices(asked)
    plans = [plan_of(c, Objective(), prices) for c in candidates(asked)]
    assert found.best.formula == min(plan.formula for plan in plans if plan is not None)


def test_replicas_put_each_gradient_into_a_bucket(model):
    prices = Prices(problem(model, "torch", data_parallels=(2,)).but(workers=2))
    (c,) = candidates(prices.problem)
    (stage,) = prices.stages_at(c, plan_of(c, Objective(), prices).bounds)
    tensors = sum(layer.parameter_tensors for layer in model.costs.layers)
    assert float(stage.all_reduce) == pytest.approx(9e-6 * tensors)


def test_what_was_measured_has_its_host_in_it(model):
    prices = Prices(problem(model, "torch", "16-workstations"))
    (kind,) = prices.places(Mesh(), 1, ()).machines[0]
    (c,) = candidates(prices.problem)
    assert prices.host_lags(kind, c.form, c.examples) is None
    assert "host" not in {name for name, seconds in terms(plan_of(c, Objective(), prices), prices).items() if seconds}
