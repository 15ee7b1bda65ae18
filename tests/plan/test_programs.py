"""What programs hide and what their sums take, by hand, in a small decoder on 8 H100s; bounds stay below."""

from dataclasses import replace

import numpy as np
import pytest

from stretto import UsageError
from stretto.cli.planning import program_of
from stretto.cost import find_cluster
from stretto.mesh import Mesh
from stretto.plan import Objective, Problem, candidates, search
from stretto.plan.bound import Bounds
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.layer_prices import ACCUMULATE
from stretto.plan.problem import LayerForm
from stretto.plan.programs import PROGRAMS, program_named
from stretto.plan.refine import refined
from stretto.settings.planning import PlanSettings
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import CostRequest, TensorFormat, costed

T, LAYERS = 4, 3
SIZES = {"depth": LAYERS, "width": 256, "heads": 4, "context": 128, "vocabulary": 128}
H100 = "8-nodes-of-8-h100"


@pytest.fixture(scope="module")
def model():
    asked = CostRequest(heads=(), sharing=(T,), format=TensorFormat("bfloat16"))
    return costed(TrainSettings(model="decoder", model_options=SIZES, optimizer="adam"), asked)


def problem(model, name, cluster=None, **changes):
    chosen = {"tensors": (T,), "data_parallels": (2,), "pipelines": (1,), "microbatches": (4,), "methods": ("1f1b",)}
    return Problem(costs=model.costs, cluster=cluster or find_cluster(H100), workers=8, batch_sizes=(64,),
                   optimizer="adam", masters=True, tensor_costs=model.tensor_costs, form_costs=model.form_costs,
                   recompute=("none",), sequences=(False,), spaces=((1, 1),), shards=("none",), all_workers=True,
                   weight_products=True, program=program_named(name), **chosen | changes)  # fmt: skip


def test_exchanges_are_waited_for_or_hidden_in_a_backward(model):
    inside = {}
    for name in PROGRAMS:
        prices = Prices(problem(model, name))
        inside[name] = prices.intra_stage(Mesh(tensor=T), 1, (), 0, LayerForm(T), 8.0, prices.hides_exchanges)
    waited, usual = inside["megatron-2021"], inside["megatron-2022"]
    links = prices.places(Mesh(tensor=T), 1, ()).weights[0]
    whole = prices.tensor_seconds(LayerForm(T), links, 8.0, prices.places(Mesh(tensor=T), 1, ()).gamma)
    assert all(np.array_equal(one, other) for one, other in zip(waited, whole, strict=True))
    assert np.array_equal(usual[0], whole[0])
    assert (usual[1][1:-1] < whole[1][1:-1]).all()


def test_operators_of_their_own_read_and_write_every_sum(model):
    """Gradients in bfloat16, sums in float32: 2 + 4 + 4 bytes a number, on kernels that start in no time."""
    rows, cluster = {}, find_cluster(H100)
    device = cluster.devices["h100"]
    device = replace(device, attained=replace(device.attained.without_host(), per_kernel=0.0))
    for name in ("torch", "megatron-2022"):
        prices = Prices(problem(model, name, replace(cluster, devices={"h100": device})))
        kind = prices.places(Mesh(tensor=T), 1, ()).machines[0][0]
        rows[name] = prices.layer_rows(kind, LayerForm(T), 8.0)[1, ACCUMULATE]
    moved = 10 * prices.layers(LayerForm(T))[1].gradient_bytes / 2
    seconds = moved / (device.memory_bandwidth * device.attained.memory)
    assert rows["torch"] == pytest.approx(device.slowest_of(T) * seconds)
    assert rows["megatron-2022"] < rows["torch"]


def test_replicas_meet_once_or_in_every_backward(model):
    stages = {}
    for name in ("torch", "apex-2019"):
        prices = Prices(problem(model, name))
        (c,) = candidates(prices.problem)
        plan = plan_of(c, Objective(), prices)
        assert Bounds(prices).seconds(c) <= plan.formula
        assert Bounds(prices).tighter(c) <= plan.formula
        assert 0.95 * plan.formula <= refined([plan], prices)[0].seconds <= plan.formula  # it adds up once less
        (stages[name],) = prices.stages_at(c, plan.bounds)
    assert stages["apex-2019"].all_reduce == c.microbatches * stages["torch"].all_reduce


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_plan_of_a_program_is_the_best_of_all(model, name):
    asked = problem(model, name, tensors=(1, T), data_parallels=None, pipelines=None, microbatches=None)
    found = search(asked, Objective(), keep=1)
    prices = Prices(asked)
    plans = [plan_of(c, Objective(), prices) for c in candidates(asked)]
    assert found.best.formula == min(plan.formula for plan in plans if plan is not None)


def test_a_step_waits_for_the_slowest_of_its_workers(model):
    """Computing takes that much longer, in the closed form and simulated; messages do not."""
    cluster = find_cluster(H100)
    device = cluster.devices["h100"]
    device = replace(device, attained=device.attained.without_host())
    slowest, both = device.slowest_of(8), []
    for each in (device, replace(device, variation=None)):
        cluster = replace(cluster, devices={"h100": each})
        prices = Prices(problem(model, "torch", cluster, tensors=(1,), data_parallels=(1,), pipelines=(8,),
                                methods=("1f1b",), microbatches=(8,)).but(pipelines=(2,), workers=2))  # fmt: skip
        (c,) = candidates(prices.problem)
        plan = plan_of(c, Objective(), prices)
        both.append((prices.stages_at(c, plan.bounds)[0], refined([plan], prices)[0].seconds))
    (slow, step), (mean, shorter) = both
    pair = find_cluster(H100).devices["h100"].slowest_of(2)
    overhead = float(mean.message_overhead) / 2
    assert float(slow.forward) == pytest.approx(pair * (float(mean.forward) - overhead) + overhead, rel=1e-3)
    assert float(slow.transit) == float(mean.transit)
    assert 1 < step / shorter <= pair < slowest


def test_a_program_is_asked_for_by_name_and_only_of_what_is_planned(model):
    assert program_of(PlanSettings(model="decoder"), model) is PROGRAMS["megatron-2022"]
    assert program_of(PlanSettings(model="decoder", program="torch"), model) is PROGRAMS["torch"]
    with pytest.raises(UsageError, match=r"program='megatron-2023'.*megatron-2022"):
        program_of(PlanSettings(model="decoder", program="megatron-2023"), model)
    with pytest.raises(UsageError, match="leave it out"):
        program_of(PlanSettings(program="torch"), replace(model, trained=object()))


def test_buckets_are_the_programs(model):
    bytes_of = {}
    for name in ("megatron-2022", "torch", "apex-2019"):
        prices = Prices(problem(model, name))
        (c,) = candidates(prices.problem)
        plan = plan_of(c, Objective(), prices)
        bytes_of[name] = max(refined([plan], prices)[0].bytes)
        assert bytes_of[name] == pytest.approx(max(plan.bytes))
    gradients = sum(layer.gradient_bytes for layer in prices.layers(LayerForm(T)))
    assert bytes_of["torch"] - bytes_of["apex-2019"] == pytest.approx(gradients)
