"""Local methods where layers share weights: a cut's costs against a Trainer's own, and plans against forecasts."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stretto
from forecasts import forecast
from laws.networks import Attention, token_loss
from pairwise import slow_where
from stretto.cost import Cluster, Device, Group, Link
from stretto.cost.head_costs import HeadCosts, borrow, laid_out, uses_in
from stretto.cost.worker_memory import peak_bytes
from stretto.errors import UsageError
from stretto.measure.layer_counting import LayerCounting
from stretto.measure.layer_flops import layer_costs
from stretto.methods import method
from stretto.optimizers import optimizer_of
from stretto.plan import Problem, search
from stretto.plan.problem import merged
from stretto.plan.refine import refined
from stretto.runtime.process_memory import peak_memory
from stretto.study.counted_heads import UncutModel, costs_of_head
from stretto.study.model_costs import outputs

VOCABULARY, WIDTH, TOKENS, BATCH = 11, 8, 5, 4
SIZE = 4 * VOCABULARY * WIDTH  # bytes of the shared weight
HEADS = ("language", "segprop(layers=2)", "solo", "man", "auglocal", "infopro", "blocks(depth=2)")


def language_model(*, tied=True):
    """An embedding that is the unembedding, too, unless it is not `tied`, and three blocks between them."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    readout = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    if tied:
        readout[1].weight = embedding.weight
    return [embedding, *(Attention(WIDTH) for _ in range(3)), readout]


def words(count, seed=0):
    return torch.randint(VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def uncut():
    layers, x, y, counting = language_model(), words(2), words(2, 1), LayerCounting()
    costs = layer_costs(layers, x, loss=token_loss, target=y, fake=counting)
    return costs, UncutModel(layers, outputs(layers, x), (x,), y, token_loss, merged(costs.layers), counting)


def cluster(**device):
    made = Device(memory=1e9, memory_bandwidth=1e9, peak={"float32": 1e9}, **device)
    links = {"far": Link(latency=1e-6, bandwidth=1e8)}
    group = Group(nodes=4, workers=1, device="d", between="far")
    return Cluster(name="c", groups=(group,), devices={"d": made}, links=links)


@pytest.mark.parametrize(
    ("name", "head", "ends"),
    [
        ("greedy", "language", (0, 2, 3, 5)),
        pytest.param("greedy", "segprop(layers=2)", (0, 2, 3, 5), marks=pytest.mark.slow),
        pytest.param(  # of stage 0 nothing is left to step
            "chunked(chunks=2)", "segprop(layers=1)", (0, 1, 3, 4, 5), marks=pytest.mark.slow
        ),
        *(pytest.param("greedy", head, (0, 2, 5), marks=pytest.mark.slow) for head in HEADS),
        *(pytest.param("overlapping", head, (0, 2, 3, 5), marks=pytest.mark.slow) for head in HEADS),
    ],
)
def test_a_cut_has_the_bytes_the_messages_and_the_flops_of_a_trainer(uncut, name, head, ends):
    costs, model = uncut
    found, reason = costs_of_head(head, model)
    assert found is not None, reason
    title = f"{name[:-1]}, head={head})" if name.endswith(")") else f"{name}(head={head})"
    trainer, x = training(language_model(), ends, title)
    behind = laid_out(found, trainer.method.reach(len(ends) - 1), costs, ends)
    assert behind.weights == trainer.weight_bytes
    _, rules = trainer.method.plan(len(ends) - 1, ties=behind.ties, reads=behind.reads)
    assert rules.ties == trainer.rules.ties

    flops = flops_of_step(trainer, x)
    last = [*ends[:-1], ends[-1] + 1]
    shared = borrow(costs, uses_in(costs, ends, rules))
    rows = zip(shared.stages(last), behind.rows, strict=True)
    whole = [stage if head is None else stage.then(head) for stage, head in rows]
    for s, (stage, optimizer) in enumerate(zip(whole, trainer.optimizers, strict=True)):
        modules = [part for part in (trainer.stages[s], trainer.heads[s]) if part is not None]
        assert stage.parameter_bytes == size({p for part in modules for p in part.parameters()})
        stepped = [] if optimizer is None else list(optimizer.state)  # InfoPro may leave some out
        assert stage.gradient_bytes == size(stepped)
        state = (value for p in stepped for value in optimizer.state[p].values() if value.dim())
        assert stage.state_bytes(optimizer_of("adam")) == size(state)
    apart = flops_of_step(*training(language_model(tied=False), ends, title))
    read = costs.layers[-2].flops("B").each - shared.layers[-2].flops("B").each
    assert apart - flops == read * BATCH
    assert read == 0, "the borrower's gradient goes to the owner"


def training(layers, ends, title):
    """A Trainer, and a batch."""
    stages, x = [nn.Sequential(*each) for each in cut(layers, ends)], words(BATCH)
    return stretto.Trainer(stages, token_loss, partial(torch.optim.Adam, lr=0.01), title, example=x), x


def flops_of_step(trainer, x):
    """What torch counts of a minibatch's real actions."""
    with FlopCounterMode(display=False) as counter:
        trainer.step(x, words(BATCH, 1))
        trainer.flush()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["language", "segprop(layers=1)", "solo"])
def test_a_forecast_s_memory_is_what_torch_s_allocator_gave(head):
    def network():
        embedding, readout = nn.Embedding(3000, 64), nn.Linear(64, 3000, bias=False)
        readout.weight = embedding.weight
        return [embedding, *(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in "ab"), readout]

    ends, x, y = (0, 2, 4), torch.randint(3000, (8, TOKENS)), torch.randint(3000, (8, TOKENS))
    layers, counting, made = network(), LayerCounting(), method(f"greedy(head={head})")
    costs = layer_costs(layers, x[:2], loss=token_loss, target=y[:2], fake=counting)
    model = UncutModel(
        layers, outputs(layers, x[:2]), (x[:2],), y[:2], token_loss, merged(costs.layers), counting
    )  # fmt: skip
    behind = laid_out(costs_of_head(head, model)[0], made.reach(2), costs, ends)
    schedule, rules = made.plan(2, 1, ties=behind.ties, reads=behind.reads)
    (told,) = peak_bytes(
        made, schedule, rules, borrow(costs, uses_in(costs, ends, rules)), (0, 2, 5), 8, optimizer="adam", behind=behind
    )
    with peak_memory() as peak:
        stages = [nn.Sequential(*each) for each in cut(network(), ends)]
        adam = partial(torch.optim.Adam, lr=1e-3)
        trainer = stretto.Trainer(stages, token_loss, adam, str(made), workers=1, device="cpu", example=x)
        for _ in range(6):
            trainer.step(x, y)
    assert told == pytest.approx(peak.bytes, rel=0.05)


def cut(layers, ends):
    return [layers[a:b] for a, b in pairwise(ends)]


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def problem_of(costs, heads, **others):
    settings = {"workers": 3, "batch_sizes": (BATCH,), "optimizer": "adam", "all_workers": True, "trained": True}
    return Problem(costs=costs, cluster=cluster(), named_heads=heads, **{**settings, **others})


@pytest.mark.parametrize("head", slow_where(lambda head: head == "solo", ["segprop(layers=1)", "solo", "auglocal"]))
def test_a_plan_is_what_a_forecast_says(uncut, head):
    costs, model = uncut
    name, found = f"greedy(head={head})", costs_of_head(head, model)[0]
    problem = problem_of(costs, {method(name).head: found}, methods=(name,), pipelines=(3,))
    result = search(problem)
    (plan,) = refined([result.best], result.prices)
    told = forecast(
        costs, [*plan.bounds[:-1], len(costs.layers)], cluster(), name, BATCH, workers=3, heads=found, optimizer="adam"
    )
    assert plan.seconds == pytest.approx(told.seconds, rel=1e-12)
    assert plan.bytes == pytest.approx(told.bytes, rel=1e-12)


def test_a_borrower_has_no_state_of_the_weight_and_no_sum_of_gradients(uncut):
    costs, model = uncut
    found = costs_of_head("language", model)[0]
    problem = problem_of(costs, {"language": found}, methods=("greedy(head=language)",), pipelines=(3,))
    result = search(problem)
    prices = result.prices
    untied = search(problem.but(costs=replace(costs, ties=(), read_rows=()))).prices
    (first, *_), (apart, *_) = (each.stages_at(result.best.candidate, (0, 2, 3, 5)) for each in (prices, untied))
    # Not a gradient and Adam's two numbers, but the weight of its modules beside the version that it computes with.
    assert apart.static_bytes - first.static_bytes == (3 - 1) * SIZE
    assert first.update < apart.update
    assert apart.backward == first.backward, "the owner has its gradient"


def test_heads_that_training_refuses_with_tied_weights_are_refused(uncut):
    costs, model = uncut
    late = costs_of_head("solo(every=3)", model)[0]
    with pytest.raises(UsageError, match=r"reads weights after every 3 updates, but layers share weights .*every=1"):
        problem_of(costs, {"solo(every=3)": late}, methods=("greedy(head=solo(every=3))",))
    stages = [nn.Sequential(*layers) for layers in cut(language_model(), (0, 2, 5))]
    with pytest.raises(UsageError, match="every=1"):
        stretto.Trainer(
            stages, token_loss, partial(torch.optim.SGD, lr=0.1), "greedy(head=solo(every=3))", example=words(2)
        )
    inner = replace(costs, ties=(replace(costs.ties[0], layers=(1, 2)),))
    reading = HeadCosts(rows=tuple(costs.layers[:5]), following=(0.0, 64.0, 64.0, 64.0, 0.0))
    with pytest.raises(UsageError, match=r"layer 2 has weights of an earlier layer \(tied weights\)"):
        problem_of(inner, {"man": reading}, methods=("greedy(head=man)",))
