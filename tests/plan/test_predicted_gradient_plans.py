"""Synthetic gradients in plans: against a Trainer's modules, forecasts, and every cut."""

from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

import stretto
from forecasts import forecast
from laws.networks import Attention, token_loss
from stretto.cost import Cluster, Device, Group, Link
from stretto.cost.head_costs import borrow, laid_out, uses_in
from stretto.cost.worker_memory import peak_bytes
from stretto.errors import UsageError
from stretto.measure.layer_counting import LayerCounting
from stretto.measure.layer_flops import layer_costs
from stretto.methods import method
from stretto.plan import Problem, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.explain import misfit
from stretto.plan.planned_methods import planned
from stretto.plan.problem import merged
from stretto.plan.refine import refined, simulated
from stretto.plan.search_space import candidates
from stretto.runtime.process_memory import peak_memory
from stretto.study.counted_heads import UncutModel, costs_of_head
from stretto.study.model_costs import outputs

VOCABULARY, WIDTH, TOKENS, BATCH = 11, 8, 5, 4
NAMES = ("synthetic-gradients", "synthetic-gradients(head=mlp(hidden=2, width=16), labels=True, delay=2)")


def language_model(*, tied):
    torch.manual_seed(0)
    embedding, readout = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    if tied:
        readout.weight = embedding.weight
    return [embedding, *(Attention(WIDTH) for _ in range(4)), readout]


def words(count, seed=0):
    return torch.randint(VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(seed))


def counted(layers):
    x, y, counting = words(2), words(2, 1), LayerCounting()
    costs = layer_costs(layers, x, loss=token_loss, target=y, fake=counting)
    model = UncutModel(layers, outputs(layers, x), (x,), y, token_loss, merged(costs.layers), counting)
    return costs, {head: costs_of_head(head, model)[0] for head in (planned(name).head for name in NAMES)}


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def uncut(request):
    return counted(language_model(tied=request.param))


def cluster(latency=1e-6):
    """Links that are as fast as the devices compute, so that messages are not hidden."""
    device = Device(memory=1e9, memory_bandwidth=1e9, peak={"float32": 1e9}, per_action=1e-6, per_step=2e-6)
    group = Group(nodes=4, workers=1, device="d", between="far")
    links = {"far": Link(latency=latency, bandwidth=1e8)}
    return Cluster(name="c", groups=(group,), devices={"d": device}, links=links)


def problem_of(uncut, name, on=None, **others):
    costs, heads = uncut
    head = planned(name).head
    settings = {
        "workers": 4, "batch_sizes": (BATCH,), "optimizer": "adam", "methods": (name,), "trained": True,
        "named_heads": {head: heads[head]},
    }  # fmt: skip
    return Problem(costs=costs, cluster=on or cluster(), **settings | others)


@pytest.mark.parametrize("latency", [1e-6, 4e-4])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_what_a_forecast_says(uncut, name, latency):
    problem = problem_of(uncut, name, cluster(latency), pipelines=(4,))
    result = search(problem)
    (plan,) = refined([result.best], result.prices)
    heads = problem.heads_of(name)
    ends = [*plan.bounds[:-1], len(problem.costs.layers)]
    told = forecast(problem.costs, ends, problem.cluster, name, BATCH, workers=4, heads=heads, optimizer="adam")
    assert plan.seconds == pytest.approx(told.seconds, rel=1e-12)
    assert plan.bytes == pytest.approx(told.bytes, rel=1e-12)
    assert plan.formula == pytest.approx(told.seconds, rel=1e-2)  # but for the runtime's own time of a step


def test_the_best_of_all_cuts(uncut):
    for latency in (1e-6, 1e-4):
        problem = problem_of(uncut, NAMES[0], cluster(latency), workers=3, pipelines=(3,))
        result = search(problem)
        layers, heads = len(problem.layers), problem.heads_of(NAMES[0])
        seconds = [
            forecast(
                problem.costs, (0, *inner, layers + 1), problem.cluster, NAMES[0], BATCH, workers=3, heads=heads,
                optimizer="adam",
            ).seconds
            for inner in combinations(range(1, layers), 2)
        ]  # fmt: skip
        assert simulated(result.best, result.prices).seconds <= min(seconds) * (1 + 1e-2)
        assert max(seconds) > 1.2 * min(seconds)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_has_the_modules_of_a_trainer(uncut, name):
    costs, heads = uncut
    ends, found = (0, 2, 4, 6), heads[planned(name).head]
    stages = [nn.Sequential(*language_model(tied=bool(costs.ties))[a:b]) for a, b in pairwise(ends)]
    trainer = stretto.Trainer(stages, token_loss, partial(torch.optim.Adam, lr=0.01), name, example=words(BATCH))
    behind = laid_out(found, trainer.method.reach(3), costs, ends)
    for row, head in zip(behind.rows, trainer.heads, strict=True):
        assert (row is None) == (head is None)
        if head is not None:
            assert row.parameters == sum(p.numel() for p in head.parameters())
    assert (behind.rows[0].type, behind.rows[2]) == ("PredictionError", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_forecast_s_memory_is_what_torch_s_allocator_gave(name):
    def network():
        embedding, readout = nn.Embedding(3000, 64), nn.Linear(64, 3000, bias=False)
        readout.weight = embedding.weight
        return [embedding, *(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in "ab"), readout]

    ends, x, y = (0, 2, 4), torch.randint(3000, (32, TOKENS)), torch.randint(3000, (32, TOKENS))
    layers, counting, made = network(), LayerCounting(), method(name)
    costs = layer_costs(layers, x[:2], loss=token_loss, target=y[:2], fake=counting)
    model = UncutModel(
        layers, outputs(layers, x[:2]), (x[:2],), y[:2], token_loss, merged(costs.layers), counting
    )  # fmt: skip
    behind = laid_out(costs_of_head(planned(name).head, model)[0], made.reach(2), costs, ends)
    schedule, rules = made.plan(2, 1, ties=behind.ties, reads=behind.reads)
    (told,) = peak_bytes(
        made,
        schedule,
        rules,
        borrow(costs, uses_in(costs, ends, rules)),
        (0, 2, 5),
        32,
        optimizer="adam",
        behind=behind,
    )
    with peak_memory() as peak:
        whole = network()  # one, so that its stages share the weight
        stages = [nn.Sequential(*whole[a:b]) for a, b in pairwise(ends)]
        adam = partial(torch.optim.Adam, lr=1e-3)
        trainer = stretto.Trainer(stages, token_loss, adam, name, workers=1, device="cpu", example=x)
        for _ in range(6):
            trainer.step(x, y)
    assert told == pytest.approx(peak.bytes, rel=0.03)


def test_replicas_and_shared_stages_are_refused_with_the_reason(uncut):
    for limit in ({"data_parallels": (2,)}, {"tensors": (2,)}):
        problem = problem_of(uncut, NAMES[0], **limit)
        assert not list(candidates(problem))
        assert "learns in one process" in misfit(problem)
    with pytest.raises(UsageError, match="they need a predicted gradient behind each stage, and the cost of head=auto"):
        problem_of(uncut, NAMES[0], named_heads={})


def test_a_stage_that_learns_keeps_its_output_and_the_graph_until_then(uncut):
    problem = problem_of(uncut, NAMES[0], pipelines=(4,))
    other = problem_of(uncut, "synthetic-gradients(delay=3)", pipelines=(4,))
    (first, *_), (later, *_) = (
        Prices(each).stages_at(next(candidates(each)), (0, 2, 3, 4, 6)) for each in (problem, other)
    )
    head = problem.heads_of(NAMES[0]).rows[1]
    output = BATCH * TOKENS * WIDTH * 4
    graph = (head.activation - (head.input - head.loose_input)).at(BATCH)
    assert later.static_bytes - first.static_bytes == pytest.approx(3 * output - (output + graph))
    assert later.backward == first.backward
    assert later.learn - first.learn == pytest.approx(forward_of(head))


def forward_of(head):
    """Seconds of a forward by the roofline of `cluster`."""
    return sum(max(work.flops.at(BATCH), work.bytes.at(BATCH)) / 1e9 for work in head.forward)
