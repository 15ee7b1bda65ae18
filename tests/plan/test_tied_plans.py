"""Methods with a single loss where layers share weights: a cut's costs against a Trainer's own, and its memory."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import stretto
from forecasts import forecast
from laws.networks import token_loss
from runtime import measured_memory as network
from runtime.processes import launch
from stretto.cost import Cluster, Device, Group, Link
from stretto.cost.head_costs import borrow, laid_out, uses_in
from stretto.cost.worker_memory import peak_bytes
from stretto.measure import layer_costs
from stretto.methods import method
from stretto.optimizers import optimizer_of
from stretto.plan import Problem, search
from stretto.plan.refine import refined

SLOW = pytest.mark.slow
ENDS = (*network.ENDS[:-1], network.ENDS[-1] + 1)  # with the loss


@pytest.fixture(scope="module")
def costs():
    x = network.words()[:2]
    return layer_costs(network.network(), x, loss=token_loss, target=x)


def laid(costs, name, workers):
    """A method on the cut of `network`, its rules, and the costs where the upper stage borrows."""
    made = method(name)
    behind = laid_out(None, made.reach(2), costs, network.ENDS)
    schedule, rules = made.plan(2, workers, ties=behind.ties, reads=behind.reads)
    return made, schedule, rules, behind, borrow(costs, uses_in(costs, network.ENDS, rules))


def told(costs, name, optimizer, workers):
    made, schedule, rules, behind, shared = laid(costs, name, workers)
    share = network.BATCH / schedule.per_turn
    return peak_bytes(made, schedule, rules, shared, ENDS, share, optimizer=optimizer, behind=behind)


@pytest.mark.parametrize("name", ["gpipe(microbatches=4)", "pb"])
def test_a_borrower_steps_nothing_of_the_weight(costs, name):
    _, _, rules, behind, shared = laid(costs, name, 2)
    layers = network.network()
    stages = [nn.Sequential(*layers[a:b]) for a, b in pairwise(network.ENDS)]
    x = network.words()
    trainer = stretto.Trainer(stages, token_loss, partial(torch.optim.Adam, lr=0.01), name, example=x)
    assert behind.weights == trainer.weight_bytes == {(0, 1): network.SIZE}
    assert rules.ties == trainer.rules.ties
    trainer.step(x, x)
    trainer.flush()
    for stage, module, optimizer in zip(shared.stages(ENDS), stages, trainer.optimizers, strict=True):
        assert stage.parameter_bytes == network.size_of([module])
        assert stage.gradient_bytes == sum(4 * p.numel() for p in optimizer.state)
        state = (value for each in optimizer.state.values() for value in each.values())
        assert stage.state_bytes(optimizer_of("adam")) == sum(4 * value.numel() for value in state if value.dim())


MEMORY = [
    ("gpipe(microbatches=4)", "adam"),
    *(pytest.param(name, "sgd", marks=SLOW) for name in ("1f1b(microbatches=4)", "pb", "pipedream")),
]


@pytest.mark.parametrize(("name", "optimizer"), MEMORY)
def test_memory_of_one_process_is_what_torch_s_allocator_gave(costs, name, optimizer):
    (expected,) = told(costs, name, optimizer, 1)
    assert expected == pytest.approx(network.peak(name, optimizer, workers=1), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("gpipe(microbatches=4)", "adam"), ("1f1b(microbatches=4)", "adam"), ("pb", "sgd"), ("pipedream", "sgd")],
)
def test_memory_of_two_processes_is_what_torch_s_allocator_gave(costs, name, optimizer):
    """The borrower has the weight of its modules, the version that it computes with, and gradients on their way."""
    measured = launch(2, "runtime.measured_memory:peak", name, optimizer, own=True)
    assert told(costs, name, optimizer, 2) == pytest.approx(measured, rel=0.025)


def cluster(bandwidth=1e9):
    made = Device(memory=1e10, memory_bandwidth=1e9, peak={"float32": 1e9})
    links = {"far": Link(latency=1e-6, bandwidth=bandwidth)}
    return Cluster(
        name="c", groups=(Group(nodes=2, workers=1, device="d", between="far"),), devices={"d": made}, links=links
    )


def problem_of(costs, name, **others):
    settings = {"workers": 2, "batch_sizes": (8,), "optimizer": "adam", "pipelines": (2,), "microbatches": (4,)}
    return Problem(costs=costs, cluster=cluster(), methods=(name,), **settings | others)


@pytest.mark.parametrize("name", ["1f1b", "pb"])
def test_a_plan_is_what_a_forecast_says(costs, name):
    microbatches = {"microbatches": (4,) if name == "1f1b" else None}
    result = search(problem_of(costs, name, trained=True, recompute=("none",), **microbatches))
    (plan,) = refined([result.best], result.prices)
    ends = [*plan.bounds[:-1], len(costs.layers)]
    written = f"{name}(microbatches=4)" if name == "1f1b" else name
    expected = forecast(costs, ends, cluster(), written, 8, workers=2, optimizer="adam")
    assert plan.seconds == pytest.approx(expected.seconds, rel=1e-12)
    assert plan.bytes == pytest.approx(expected.bytes, rel=1e-12)


def test_networks_that_are_only_planned_keep_both_copies(costs):
    """As systems for large models do: four numbers each, of Adam. Training has the modules' own weight, the version
    that it computes with, and a gradient to send.
    """
    for planned_only, fewer in ((True, 0), (False, 1)):
        problem = problem_of(costs, "1f1b", weight_products=planned_only)
        prices = search(problem).prices
        untied = search(problem.but(costs=replace(costs, ties=(), read_rows=()))).prices
        c = search(problem).best.candidate
        (*_, last), (*_, apart) = (each.stages_at(c, (0, 2, 4)) for each in (prices, untied))
        assert apart.static_bytes - last.static_bytes == fewer * network.SIZE
