"""Forwards that are run again: exact where weights are kept, an explicit-version reference where they are not."""

import ast
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, Network, assert_equal, features, labels, train_plainly
from laws.numpy_network import Delayed
from laws.numpy_network import Network as NumpyNetwork
from laws.test_delayed import assert_trains_as, batches, modules
from pairwise import in_turn, thinned
from stretto.errors import UsageError
from stretto.measure import measure
from stretto.simulate import simulate
from stretto.stage.stage import Graph

S, WIDTHS = 5, [6, 7, 8, 7, 6, 4]
LR, MOMENTUM, DECAY = 0.02, 0.9, 1e-3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)


def method(name, **options):
    found = stretto.method(name)
    return stretto.method(found.name, **found.options, **options)


# -- exact where the weights are kept ---------------------------------------------------------------------------------


def blocks_that_draw_and_count():
    """Dropout, BatchNorm, and a weight that a buffer of its layer decides (spectral_norm)."""

    def block(a, b):
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(a, b))
        return nn.Sequential(linear, nn.BatchNorm1d(b), nn.ReLU(inplace=True), nn.Dropout(0.3))

    return [block(6, 7), block(7, 5), block(5, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4))]


EXACT = {
    **NETWORKS,
    "transformer": replace(NETWORKS["transformer"], batch=lambda g: tuple(torch.randint(11, (2, 4, 5), generator=g))),
    "draws": Network(blocks_that_draw_and_count, lambda g: (features(g, 8, 6), labels(g, 8))),
}


def trained(network, name, num_stages, *, optimizer=SGD, workers=None, steps=7, **options):
    trainer = stretto.Trainer(
        network.stages(num_stages), network.loss, optimizer, method(name, **options), workers=workers
    )
    losses = [trainer.step(x, y) for x, y in network.batches(steps)]
    return trainer, [loss for loss in losses if loss is not None] + trainer.flush()


class PassesOn(nn.Module):
    """A last stage that gives its input, too, as the decoder of an encoder-decoder does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return self.linear(x), x


def of_both(output, target):
    """The loss of an output, and the square of what was passed on."""
    return cross_entropy(output[0], target) + 0.1 * output[1].square().mean()


def test_an_input_that_the_last_stage_passes_on_has_a_gradient_in_a_forward_without_a_graph():
    def build():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double(), PassesOn().double()]

    generator = torch.Generator().manual_seed(1)
    data = [(features(generator, 8, 6), labels(generator, 8)) for _ in range(3)]
    wanted, losses = train_plainly(build(), of_both, SGD, None, data)
    loss = stretto.mean(of_both)
    trainer = stretto.Trainer(build(), loss, SGD, "gpipe(microbatches=2, recompute=true)")
    assert [trainer.step(x, y) for x, y in data] == pytest.approx(losses, rel=1e-12)
    assert_equal(trainer.stages, wanted, tolerance=1e-12)


SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v"]
STASHED = ["pipedream", "pipedream-2bw", "pb(stash=True)", "pb(stash=True, predict=velocity, horizon=3)", "nesterov"]


@pytest.mark.parametrize(
    ("name", "network"),
    [*thinned([(name, "draws") for name in SYNCHRONOUS], 2), *in_turn(SYNCHRONOUS, list(NETWORKS), slow=1)],
)
def test_synchronous_training_is_the_same_bit_for_bit(network, name):
    """Running statistics and counters included, which a second forward must not move."""
    found = EXACT[network]
    pieces = {"microbatches": 3}
    plain, losses = trained(found, name, 4, **pieces)
    again, others = trained(found, name, 4, recompute=True, **pieces)
    assert again.rules.recompute
    assert losses == others
    assert_equal(again.stages, plain.stages)


OTHERS = [*((name, True) for name in NETWORKS), ("draws", 1), ("tuples", 3)]


@pytest.mark.parametrize(
    ("name", "case"), [*((name, ("draws", True)) for name in STASHED), *in_turn(STASHED, OTHERS, rounds=2, slow=2)]
)
def test_training_with_kept_weights_is_the_same_bit_for_bit(name, case):
    network, recompute = case
    optimizer = partial(torch.optim.NAdam, lr=0.01) if name == "nesterov" else SGD
    found = EXACT[network]
    plain, losses = trained(found, name, 4, optimizer=optimizer)
    again, others = trained(found, name, 4, optimizer=optimizer, recompute=recompute)
    assert losses == others
    assert_equal(again.stages, plain.stages)


@pytest.mark.parametrize(("name", "workers"), [("backprop", 1), ("greedy", 2), ("chunked", 1), ("chunked", 2)])
def test_one_worker_for_several_stages(name, workers):
    """Heads too are run again, where a worker does something else before it comes back to them."""
    network = EXACT["mlp"]
    (plain, losses), (again, others) = (
        trained(network, name, 4, workers=workers, recompute=recompute) for recompute in (False, True)
    )
    assert again.rules.recompute
    assert losses == others
    assert_equal([*again.stages, *again.heads], [*plain.stages, *plain.heads])


@pytest.mark.parametrize("name", thinned(sorted(set(stretto.methods.METHODS) - {"nesterov"}), 2, first=1))
def test_one_stage_is_plain_training(name):
    """Up to the order in which micro-batches are summed."""
    network = NETWORKS["mlp"]
    data = network.batches(8)
    wanted, _ = train_plainly(network.stages(1), network.loss, SGD, None, data)
    trainer, _ = trained(network, name, 1, steps=8, recompute=True)
    assert_equal(trainer.stages, wanted, tolerance=1e-12)


@pytest.mark.parametrize("name", thinned(["pipedream", "pipedream-2bw", "pb(stash=True)"], 2))
def test_synchronous_phases_before_and_after(name):
    phases = {"warmup": 3, "finish": 7}
    network = EXACT["draws"]
    plain, losses = trained(network, name, 4, **phases)
    again, others = trained(network, name, 4, recompute=True, **phases)
    assert losses == others
    assert_equal(again.stages, plain.stages)


# -- an explicit-version reference where they are not -----------------------------------------------------------------


class Recomputed(NumpyNetwork):
    """Three lists of weights: a forward's, which gives the loss and what segments begin with; a recompute's; a
    backward's. No line of it is shared with what it checks."""

    def gradient(self, forward, recompute, backward, segments, x, y):
        given, made = [x], []
        for s, (w, b) in enumerate(forward):
            made.append(self.layer(s, w, b, given[s]))
            given.append(made[s])
        logits = made[-1] - made[-1].max(1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        loss = -np.log(probabilities[np.arange(len(y)), y]).mean()
        for segment in segments[:-1]:
            h = given[segment[0]]
            for s in segment:
                given[s] = h
                h = made[s] = self.layer(s, *recompute[s], h)
        delta = (probabilities - np.eye(probabilities.shape[1])[y]) / len(y)
        gradients = [None] * len(forward)
        for s in range(len(forward) - 1, -1, -1):
            if s != len(forward) - 1:
                delta = delta * (1 - made[s] ** 2)
            gradients[s] = (delta.T @ given[s], delta.sum(0))
            delta = delta @ backward[s][0]
        return gradients, loss

    def layer(self, s, w, b, h):
        z = h @ w.T + b
        return z if s == len(self.start) - 1 else np.tanh(z)


SEGMENTS = {"True": [[0, 1], [2, 3], [4]], "1": [[0], [1], [2], [3], [4]], "3": [[0, 1, 2], [3, 4]]}


def train_recomputed(data, segments, delay, seen, again, read, every=1, **options):
    """As `laws.numpy_network.train_delayed`, with a recompute that has tau_r = D_s - D_e updates left, where its
    segment ends at e: of minibatch t it sees again(stage, s, k, tau_r) with k = max(0, t - tau_r) updates made.

    With `every` micro-batches to an update delays are as many micro-batches, and an `every`-th of that in updates.
    """
    network = Recomputed(WIDTHS)
    stages = [
        Delayed(list(pair), delay(s) / every, lr=LR, momentum=MOMENTUM, decay=DECAY, **options)
        for s, pair in enumerate(network.start)
    ]
    left = [delay(s) - delay(segment[-1]) for segment in segments for s in segment]
    losses = []
    for t, (x, y) in enumerate(data):
        sums, total = [[0.0, 0.0] for _ in stages], 0.0
        for i, (part, targets) in enumerate(zip(np.array_split(x, every), np.array_split(y, every), strict=True)):
            m = t * every + i
            forward = [seen(stage, s, max(0, m - delay(s)) // every) for s, stage in enumerate(stages)]
            recompute = [
                again(stage, s, max(0, m - left[s]) // every, left[s] / every) for s, stage in enumerate(stages)
            ]
            backward = [read(stage, s, t) for s, stage in enumerate(stages)]
            gradients, loss = network.gradient(forward, recompute, backward, segments, part, targets)
            share = len(part) / len(x)
            total += share * loss
            sums = [[a + share * g for a, g in zip(*pair, strict=True)] for pair in zip(sums, gradients, strict=True)]
        losses.append(total)
        for stage, g in zip(stages, sums, strict=True):
            stage.apply(g)
    return [stage.versions[-1] for stage in stages], losses


def pb_delay(s):
    return 2 * (S - 1 - s)


def async_delay(s):
    return S - 1 - s


def current(stage, s, k, *_):
    return stage.versions[k]


def part_way_back(stage, s, k, left):
    """w_k - (D - tau_r) delta_k: back to the forward, D - tau_r updates before."""
    delta = stage.deltas[k]
    if delta is None:
        return stage.versions[k]
    return [w - (stage.delay - left) * d for w, d in zip(stage.versions[k], delta, strict=True)]


def decayed(d):
    return MOMENTUM * (1 - MOMENTUM**d) / (1 - MOMENTUM)


def corrected(stage, s, t):
    return stage.corrected(t)


# method: delay, what a forward sees, what its recompute, what its backward reads, options of the reference
CURED = {
    "pb": (pb_delay, current, current, current, {}),
    "pb-sc": (pb_delay, current, current, current, {"spike": True}),
    "paci(every=1)": (async_delay, current, current, current, {}),
    "paci(every=3)": (async_delay, current, current, current, {"every": 3}),
    "pipemare": (pb_delay, current, part_way_back, corrected, {}),
    "pipemare(microbatches=3)": (pb_delay, current, part_way_back, corrected, {"every": 3}),
    "pipemare(microbatches=12, reschedule=9)": (pb_delay, current, part_way_back, corrected, {"every": 12, "until": 9}),
    "pipemare(correct=False)": (pb_delay, current, current, current, {}),
    "pipemare(reschedule=15)": (pb_delay, current, part_way_back, corrected, {"until": 15}),
    "pipemare(reschedule=15, correct=False)": (pb_delay, current, current, current, {"until": 15}),
    "pb-lwp": (
        pb_delay,
        lambda stage, s, k: stage.velocity_ahead(k, stage.delay),
        lambda stage, s, k, left: stage.velocity_ahead(k, left),
        current,
        {},
    ),
    "pb-lwp(horizon=decayed)": (
        pb_delay,
        lambda stage, s, k: stage.velocity_ahead(k, decayed(stage.delay)),
        lambda stage, s, k, left: stage.velocity_ahead(k, decayed(left)),
        current,
        {},
    ),
    "pb-lwp-sc": (
        pb_delay,
        lambda stage, s, k: stage.weight_ahead(k, stage.delay),
        lambda stage, s, k, left: stage.weight_ahead(k, left),
        current,
        {"spike": True},
    ),
    "spectrain": (
        async_delay,
        lambda stage, s, k: stage.velocity_ahead(k, s // 2 + S - 1 - s),
        lambda stage, s, k, left: stage.velocity_ahead(k, s // 2 + left),
        lambda stage, s, t: stage.velocity_ahead(t, s // 2),
        {},
    ),
}


LAYOUTS = [("True", 5), ("True", 2), ("1", 5), ("3", 3)]  # segments, and workers


REPEATED = ["paci(every=1)", "pipemare", "pipemare(microbatches=12, reschedule=9)", "pipemare(correct=False)",
            "pipemare(reschedule=15, correct=False)"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, LAYOUTS[(i + n) % 4], marks=[pytest.mark.slow] * (n > 0 or name in REPEATED))
        for n in range(2)
        for i, name in enumerate(CURED)
    ],
)
def test_weights_and_losses_equal_the_reference(name, layout):
    """Over fill, steady state and drain: 23 minibatches, at most 8 in flight."""
    recompute, workers = layout
    data = batches()
    delay, seen, again, read, options = CURED[name]
    expected, losses = train_recomputed(data, SEGMENTS[recompute], delay, seen, again, read, **options)
    trainer = stretto.Trainer(
        modules(Recomputed(WIDTHS)), cross_entropy,
        partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY),
        method(name, recompute=ast.literal_eval(recompute)), workers=workers,
    )  # fmt: skip
    assert_trains_as(trainer, data, expected, losses)


@pytest.mark.slow  # of the references alone
def test_the_reference_tells_them_apart():
    """Methods, and lengths of segments, end somewhere else by far more than the tolerance."""
    data, ends = batches(), {}
    for name, (delay, seen, again, read, options) in CURED.items():
        for recompute in SEGMENTS if name in ("pb", "pipemare", "pb-lwp") else ["True"]:
            found, _ = train_recomputed(data, SEGMENTS[recompute], delay, seen, again, read, **options)
            ends[name, recompute] = np.concatenate([each.ravel() for pair in found for each in pair])
    assert np.abs(ends["pb", "True"] - ends.pop(("pipemare(correct=False)", "True"))).max() == 0
    for one, other in combinations(ends, 2):
        assert np.abs(ends[one] - ends[other]).max() > 1e-6, (one, other)


RESUMED = ["pb", "pb-lwp-sc", "spectrain", "paci(every=3)", "pipedream", "gpipe", "pipemare(warmup=5, finish=17)"]


@pytest.mark.parametrize("name", thinned(RESUMED, 3))
def test_a_resumed_run_is_the_run_that_went_on(name, tmp_path):
    data = [(torch.tensor(x), torch.tensor(y)) for x, y in batches()]

    def make(seed):
        chosen = method(name, recompute=True)
        return stretto.Trainer(
            modules(NumpyNetwork(WIDTHS, seed)), cross_entropy, partial(torch.optim.SGD, lr=LR, momentum=0.9), chosen
        )

    one, other = make(0), make(1)
    for x, y in data[:11]:
        one.step(x, y)
    one.save(tmp_path / "run.pt")
    other.load(tmp_path / "run.pt")
    for x, y in data[11:]:
        assert one.step(x, y) == other.step(x, y)
    assert one.flush() == other.flush()
    assert_equal(one.stages, other.stages)


# -- what is held, counted, asserted ----------------------------------------------------------------------------------


def deep(num_stages=9):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6)) for _ in range(num_stages)]


def step(trainer):
    trainer.step(torch.randn(8, 6), torch.randint(6, (8,)))


@pytest.mark.parametrize(
    ("name", "delay"), thinned([("pb", 2), ("pipemare", 2), ("pb(stash=True)", 2), ("pipedream", 1)], 3)
)
def test_no_graph_is_held_between_a_forward_and_its_recompute(name, delay):
    """Between turns: D_s - D_e graphs a stage, D_e inputs where a segment begins, and nothing that hangs on a graph."""
    trainer = stretto.Trainer(deep(), cross_entropy, SGD, method(name, recompute=3))
    for _ in range(20):
        step(trainer)
        held = {(edge.value, edge.source): value for edge, value in trainer._interpreter.values.items()}
        for (value, source), kept in held.items():
            if source.stage in range(6):
                assert (value == "graph") == isinstance(kept, Graph)
                assert value != "graph" or source.kind == "C"
            if value in ("input", "activation", "recomputed"):
                assert not any(tensor.requires_grad for tensor in kept)
    count = [[sum(key == (value, s) for key in ((v, a.stage) for v, a in held)) for s in range(6)]
             for value in ("graph", "input")]  # fmt: skip
    wait = [delay * (8 - s) for s in range(9)]
    assert count[0] == [wait[s] - wait[s // 3 * 3 + 2] for s in range(6)]
    assert count[1] == [wait[2], 0, 0, wait[5], 0, 0]
    peaks = simulate(trainer.schedule, trainer.rules, 25)
    assert peaks.peak_graphs[:6] == tuple(many + 1 for many in count[0])
    assert peaks.peak_inputs[:6] == tuple(many + (s % 3 == 0) for s, many in enumerate(count[1]))
    trainer.flush()
    assert not trainer._interpreter.values


@pytest.mark.parametrize("name", thinned(["pb", "pipemare", "pb-lwp", "paci", "pipedream", "gpipe"], 3))
def test_statistics_are_counted_once(name):
    trainer = stretto.Trainer(deep(4), cross_entropy, SGD, method(name, recompute=True))
    for _ in range(6):
        step(trainer)
    trainer.flush()
    forwards = 6 * trainer.schedule.per_turn
    assert [int(stage[2].num_batches_tracked) for stage in trainer.stages] == [forwards] * 4


def test_a_module_whose_backward_would_see_old_weights_is_refused_at_its_first_forward():
    """Interior stages change weights between recompute and backward; the last of a segment does not, and takes all."""

    def make(position):
        stages = deep(4)
        nn.utils.parametrizations.weight_norm(stages[position][0])
        return stretto.Trainer(stages, cross_entropy, SGD, method("pb", recompute=2))

    with pytest.raises(UsageError, match=r"0 \(ParametrizedLinear\)") as error:
        step(make(0))
    assert "in action 0F0" in error.value.__notes__[0]
    trainer = make(1)
    for _ in range(9):
        step(trainer)
    trainer.flush()


def test_a_recompute_at_another_time_than_promised_is_caught():
    trainer = stretto.Trainer(deep(4), cross_entropy, SGD, method("pb", recompute=2))
    for _ in range(8):
        step(trainer)
    values = trainer._interpreter.values
    next(value for edge, value in values.items() if edge.value == "graph" and edge.stage == 0).recomputed += 1
    with pytest.raises(AssertionError, match=r"0B2: recomputed 1 updates ago, the schedule promises 2"):
        step(trainer)


@pytest.mark.parametrize(("name", "per_turn"), [("pb", 1), ("gpipe", 4)])
def test_a_recompute_costs_a_forward(name, per_turn):
    """By hand: 2 * 6 * 6 FLOPs a forward; the paper's accounting charges 1 + 1 + 2 of them."""
    found = method(name, recompute=True)
    trainer = stretto.Trainer(deep(4), cross_entropy, SGD, found)
    again = 2 if name == "pb" else 4
    x, y = torch.randn(8, 6), torch.randint(6, (8,))
    counted, paper = (measure(trainer, x, y, accounting) for accounting in ("counted", "paper"))
    assert {key: counted.flops[key] for key in counted.flops if key[0] == "C"} == {("C", s): 72 for s in range(again)}
    assert {counted.flops["F", s] for s in range(4)} == {72}
    assert paper.total == 72 * (3 * 4 + again)
    if name == "pb":
        assert paper.serial == 72 * 4
