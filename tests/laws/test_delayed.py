"""Asynchronous and synchronous pipelines equal an explicit-version reference in numpy, from fill to drain."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from laws.numpy_network import Delayed, DelayedAdam, Network, train, train_delayed
from pairwise import each_once, in_turn, pairwise, slow_where, thinned

S, STEPS, BATCH = 5, 23, 12
WIDTHS = [6, 7, 8, 7, 6, 4]

DELAYS = {
    "backprop": lambda s: 0,
    "gpipe": lambda s: 0,
    "1f1b(microbatches=6)": lambda s: 0,
    "zb-h1": lambda s: 0,
    "pipedream": lambda s: S - 1 - s,
    "pipedream-2bw": lambda s: 1,
    "pipedream-2bw(microbatches=7)": lambda s: 1,
}


def modules(network):
    stages = []
    for s, (w, b) in enumerate(network.start):
        linear = nn.Linear(w.shape[1], w.shape[0], dtype=torch.float64)
        linear.weight.data, linear.bias.data = torch.tensor(w), torch.tensor(b)
        stages.append(linear if s == S - 1 else nn.Sequential(linear, nn.Tanh()))
    return stages


def batches(seed=1):
    draw = np.random.default_rng(seed)
    return [(draw.normal(size=(BATCH, WIDTHS[0])), draw.integers(0, WIDTHS[-1], BATCH)) for _ in range(STEPS)]


def assert_trains_as(trainer, data, expected, losses):
    """Every loss and every weight, to 1e-10."""
    got = [trainer.step(torch.tensor(x), torch.tensor(y)) for x, y in data]
    got = [loss for loss in got if loss is not None] + trainer.flush()
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-10)
    for (w, b), stage in zip(expected, trainer.stages, strict=True):
        linear = stage if isinstance(stage, nn.Linear) else stage[0]
        np.testing.assert_allclose(linear.weight.detach().numpy(), w, rtol=0, atol=1e-10)
        np.testing.assert_allclose(linear.bias.detach().numpy(), b, rtol=0, atol=1e-10)


PLAIN = ["backprop", "gpipe", "1f1b(microbatches=6)"]


@pytest.mark.parametrize(
    ("method", "workers"),
    [
        *in_turn([method for method in DELAYS if method not in PLAIN], (None, 3, 1), rounds=2, slow=1),
        *in_turn(PLAIN, (None, 3, 1), rounds=2, slow=2),
    ],
)
def test_weights_and_losses_equal_the_reference(method, workers):
    network, data = Network(WIDTHS), batches()
    expected, losses = train(network, data, DELAYS[method])
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3), method, workers=workers,
    )  # fmt: skip
    assert_trains_as(trainer, data, expected, losses)


def test_the_reference_knows_delay_from_none():
    """A check that cannot fail is none: the delays of this test change the weights by more than the tolerance."""
    network, data = Network(WIDTHS), batches()
    plain = train(network, data, lambda s: 0)[0]
    for delay in (lambda s: 1, lambda s: S - 1 - s):
        other = train(network, data, delay)[0]
        assert max(np.abs(a[0] - b[0]).max() for a, b in zip(plain, other, strict=True)) > 1e-3


LR, MOMENTUM, DECAY = 0.02, 0.9, 1e-3


def pb_delay(s):
    return 2 * (S - 1 - s)


def async_delay(s):
    return S - 1 - s


def current(stage, s, k):
    return stage.versions[k]


def velocity(horizon):
    return lambda stage, s, k: stage.velocity_ahead(k, horizon(s))


def weight(horizon):
    return lambda stage, s, k: stage.weight_ahead(k, horizon(s))


def now(stage, s, t, forward):
    return stage.versions[t]


def stashed(stage, s, t, forward):
    return forward


def decayed(s):
    return MOMENTUM * (1 - MOMENTUM ** pb_delay(s)) / (1 - MOMENTUM)


# method: delay, what a forward sees, what its backward reads, options of the reference
CURED = {
    "pb": (pb_delay, current, now, {}),
    "pb(stash=True)": (pb_delay, current, stashed, {}),
    "pb-sc": (pb_delay, current, now, {"spike": True}),
    "pb(spike=True, stash=True)": (pb_delay, current, stashed, {"spike": True}),
    "pb-lwp": (pb_delay, velocity(pb_delay), now, {}),
    "pb-lwp(horizon=3)": (pb_delay, velocity(lambda s: 3), now, {}),
    "pb-lwp(horizon=decayed)": (pb_delay, velocity(decayed), now, {}),
    "pb(predict=velocity, stash=True)": (pb_delay, velocity(pb_delay), stashed, {}),
    "pb-lwpw": (pb_delay, weight(pb_delay), now, {}),
    "pb(predict=weight, horizon=decayed, stash=True)": (pb_delay, weight(decayed), stashed, {}),
    "pb-lwp-sc": (pb_delay, weight(pb_delay), now, {"spike": True}),
    "pb(predict=velocity, spike=True)": (pb_delay, velocity(pb_delay), now, {"spike": True}),
    "spectrain": (
        async_delay,
        velocity(lambda s: s // 2 + S - 1 - s),
        lambda stage, s, t, forward: stage.velocity_ahead(t, s // 2),
        {},
    ),
    "pipemare": (pb_delay, current, lambda stage, s, t, forward: stage.corrected(t), {}),
    "pipemare(reschedule=15)": (pb_delay, current, lambda stage, s, t, forward: stage.corrected(t), {"until": 15}),
    "pipemare(reschedule=15, correct=False)": (pb_delay, current, now, {"until": 15}),
}


CROSSED = ("pb(spike=True, stash=True)", "pb(predict=weight, horizon=decayed, stash=True)",
           "pb(predict=velocity, spike=True)", "pipemare(reschedule=15, correct=False)")  # fmt: skip


@pytest.mark.parametrize(
    ("method", "workers"),
    [
        pytest.param(method, (None, None, 2)[i % 3], marks=[pytest.mark.slow] * (method in CROSSED))
        for i, method in enumerate(CURED)
    ],
)
def test_cures_equal_the_reference(method, workers):
    network, data = Network(WIDTHS), batches()
    delay, seen, read, options = CURED[method]
    expected, losses = train_delayed(network, data, delay, seen, read, lr=LR, momentum=MOMENTUM, decay=DECAY, **options)
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY), method, workers=workers,
    )  # fmt: skip
    assert_trains_as(trainer, data, expected, losses)


@pytest.mark.parametrize(
    ("pause", "cut"), in_turn(["flush", "save", "phase"], [(5, None), (7, 2)], rounds=2, slow=1), ids=str
)
def test_2bw_sees_the_newest_weights_after_a_flush(cut, pause, tmp_path):
    """All micro-batches of the first minibatch after one do, and those of the second see the same, one update old.

    That is how training begins, too. A checkpoint drains, and so does a change of phase; an evaluation does not.
    """
    (microbatches, workers), network, data = cut, Network(WIDTHS), batches()
    starts, phases = ((0, 9), {"warmup": 9, "finish": 16}) if pause == "phase" else ((0, 9, 10, 16), {})
    versions, velocity, losses = [[list(pair) for pair in network.start]], None, []
    for t, (x, y) in enumerate(data):
        start = max(each for each in starts if each <= t)
        plain = phases and not 9 <= t < 16
        seen = versions[t if plain else max(start, t - 1)]
        gradients, loss = network.gradient(seen, seen, x, y)
        losses.append(loss)
        new = [g for pair in gradients for g in pair]
        velocity = new if velocity is None else [MOMENTUM * v + g for v, g in zip(velocity, new, strict=True)]
        moved = iter(velocity)
        versions.append([[w - LR * next(moved) for w in pair] for pair in versions[-1]])
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM),
        stretto.method("pipedream-2bw", microbatches=microbatches, **phases), workers=workers,
    )  # fmt: skip
    got = []
    for t, (x, y) in enumerate(data):
        if t in starts and pause == "flush":
            trainer.flush()  # what it returns comes from `step` in its turn, too
        if t in starts and pause == "save":
            trainer.save(tmp_path / "run")
        if t == 12:
            trainer.evaluate([(torch.tensor(x), torch.tensor(y))])
        got.append(trainer.step(torch.tensor(x), torch.tensor(y)))
    got = [loss for loss in [*got, *trainer.flush()] if loss is not None]
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-10)
    for (w, b), stage in zip(versions[-1], trainer.stages, strict=True):
        linear = stage if isinstance(stage, nn.Linear) else stage[0]
        np.testing.assert_allclose(linear.weight.detach().numpy(), w, rtol=0, atol=1e-10)
        np.testing.assert_allclose(linear.bias.detach().numpy(), b, rtol=0, atol=1e-10)


PHASED = ["pb", "pb(stash=True)", "pb-sc", "pb-lwp", "pb-lwp-sc", "spectrain", "pipemare", "pipemare(reschedule=15)"]


PHASES = [{"warmup": 6, "finish": 15}, {"warmup": 7}, {"finish": 12}, {"warmup": 99}]


@pytest.mark.parametrize(("method", "phases"), in_turn(PHASED, PHASES, rounds=2, slow=1))
def test_synchronous_phases_equal_the_reference(method, phases):
    """Before, between and after them the pipeline is empty; what a cure knows of past updates goes on through them."""
    network, data = Network(WIDTHS), batches()
    delay, seen, read, options = CURED[method]
    chosen = dict(lr=LR, momentum=MOMENTUM, decay=DECAY, **options, **phases)
    expected, losses = train_delayed(network, data, delay, seen, read, **chosen)
    found = stretto.method(method)
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY),
        stretto.method(found.name, **found.options, **phases),
    )  # fmt: skip
    assert_trains_as(trainer, data, expected, losses)


@pytest.mark.parametrize(
    "method",
    slow_where(
        lambda method: method in ("pipedream", "pipedream-2bw"),
        ["pipedream", "pipedream-2bw", "pipedream-2bw(microbatches=7)", "paci(every=3)"],
    ),
)
def test_a_warm_up_as_long_as_the_run_is_plain_training(method):
    """Minibatches are cut as the method cuts them, and updated once each."""
    network, data = Network(WIDTHS), batches()
    expected, losses = train(network, data, lambda s: 0)
    found = stretto.method(method)
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
        stretto.method(found.name, **found.options, warmup=STEPS),
    )  # fmt: skip
    assert_trains_as(trainer, data, expected, losses)


@pytest.mark.parametrize(
    ("save_at", "method"),
    thinned(in_turn([2, 5, 9, 14, 16], ["pipemare", "pb-lwp-sc", "pipedream-2bw", "spectrain"], rounds=2), 3),
)
def test_a_run_resumed_in_any_phase_is_the_run_that_went_on(method, save_at, tmp_path):
    data = [(torch.tensor(x), torch.tensor(y)) for x, y in batches()]

    def make(seed):
        return stretto.Trainer(
            modules(Network(WIDTHS, seed)), nn.functional.cross_entropy,
            lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM),
            stretto.method(method, warmup=5, finish=14),
        )  # fmt: skip

    one, other = make(0), make(1)
    for x, y in data[:save_at]:
        one.step(x, y)
    one.save(tmp_path / "run.pt")
    other.step(*data[0])
    other.load(tmp_path / "run.pt")
    for x, y in data[save_at:]:
        assert one.step(x, y) == other.step(x, y)
    assert one.flush() == other.flush()
    for a, b in zip(one.stages, other.stages, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.slow  # of the references alone
def test_the_cures_differ_from_each_other():
    """Every row ends somewhere else, by far more than the tolerance; but for the two forms of prediction alone.

    Those are equal for plain momentum SGD, and differ once spike compensation joins (Kosson et al. 2021).
    """
    network, data = Network(WIDTHS), batches()
    ends = {}
    for name, (delay, seen, read, options) in CURED.items():
        found, _ = train_delayed(network, data, delay, seen, read, lr=LR, momentum=MOMENTUM, decay=DECAY, **options)
        ends[name] = np.concatenate([each.ravel() for pair in found for each in pair])
    assert np.abs(ends["pb-lwp"] - ends.pop("pb-lwpw")).max() < 1e-12
    for one, other in combinations(ends, 2):
        assert np.abs(ends[one] - ends[other]).max() > 1e-6, (one, other)


def step(horizon):
    return lambda stage, s, k: stage.step_ahead(k, horizon(s))


# method: delay, what a forward sees, what its backward reads
PREDICTED = {
    "pb(predict=step)": (pb_delay, step(pb_delay), now),
    "pb(predict=step, horizon=decayed)": (pb_delay, step(decayed), now),
    "pb(predict=step, stash=True)": (pb_delay, step(pb_delay), stashed),
    "pipeoptim": (async_delay, step(async_delay), now),
    "pb-lwpw": (pb_delay, weight(pb_delay), now),
}
ADAM = {"kind": DelayedAdam, "lr": LR, "betas": (MOMENTUM, 0.95), "decay": 0.1}
RULES = {
    "sgd": (torch.optim.SGD, {"momentum": MOMENTUM, "weight_decay": 0.1}, {"momentum": MOMENTUM, "kind": Delayed}),
    "adam": (torch.optim.Adam, {"betas": ADAM["betas"], "weight_decay": 0.1}, {**ADAM, "decoupled": False}),
    "adamw": (torch.optim.AdamW, {"betas": ADAM["betas"], "weight_decay": 0.1}, {**ADAM, "decoupled": True}),
    "amsgrad": (
        torch.optim.AdamW,
        {"betas": ADAM["betas"], "weight_decay": 0.1, "amsgrad": True},
        {**ADAM, "decoupled": True, "amsgrad": True},
    ),
}
SCHEDULES = {
    "constant": (None, lambda k: 1.0),
    "lambda": (
        lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda k: 1 / (1 + k / 5)),
        lambda k: 1 / (1 + k / 5),
    ),
    "cosine": (
        lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=STEPS),
        lambda k: (1 + np.cos(np.pi * k / STEPS)) / 2,
    ),
}


def by_reference(method, rule, schedule, network, data):
    """The weights of all stages, and the losses."""
    delay, seen, read = PREDICTED[method]
    chosen = {"lr": LR, "decay": 0.1, **RULES[rule][2]}
    return train_delayed(network, data, delay, seen, read, **chosen, schedule=SCHEDULES[schedule][1])


@pytest.mark.parametrize(("method", "rule", "schedule"), each_once(pairwise(PREDICTED, RULES, SCHEDULES)))
def test_prediction_along_the_optimizers_step_equals_the_reference(method, rule, schedule):
    """And the weight form, which takes any optimizer."""
    network, data = Network(WIDTHS), batches()
    make, options, _ = RULES[rule]
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy, lambda params: make(params, lr=LR, **options), method,
        scheduler=SCHEDULES[schedule][0],
    )  # fmt: skip
    assert_trains_as(trainer, data, *by_reference(method, rule, schedule, network, data))


@pytest.mark.slow  # of the references alone
def test_these_references_differ_from_each_other():
    """Method, optimizer and schedule each change the weights by far more than the tolerance.

    But for the weight form at a constant rate, which is the step form: w_t - w_{t-1} is the step. Only AdamW's decay,
    taken of the weights before it, tells them apart.
    """
    network, data = Network(WIDTHS), batches()
    ends = {}
    for method in PREDICTED:
        for rule in RULES:
            for schedule in SCHEDULES:
                found, _ = by_reference(method, rule, schedule, network, data)
                ends[method, rule, schedule] = np.concatenate([each.ravel() for pair in found for each in pair])
    for rule in ("sgd", "adam"):
        assert (
            np.abs(ends["pb(predict=step)", rule, "constant"] - ends.pop(("pb-lwpw", rule, "constant"))).max() < 1e-12
        )
    for one, other in combinations(ends, 2):
        assert np.abs(ends[one] - ends[other]).max() > 1e-6, (one, other)


@pytest.mark.parametrize("schedule", slow_where(lambda name: name != "one-cycle", ["constant", "cosine", "one-cycle"]))
@pytest.mark.parametrize(
    "method", ["pipeoptim", pytest.param("pb(predict=step, horizon=decayed, stash=True)", marks=pytest.mark.slow)]
)
def test_a_resumed_prediction_knows_the_rates_to_come(method, schedule, tmp_path):
    """Saved and loaded, also into a trainer that is further, or was made with another learning rate."""
    data = [(torch.tensor(x), torch.tensor(y)) for x, y in batches()]
    scheduler = {
        "constant": None,
        "cosine": SCHEDULES["cosine"][0],
        "one-cycle": lambda made: torch.optim.lr_scheduler.OneCycleLR(made, LR, total_steps=STEPS),
    }[schedule]

    def make(seed, lr=LR):
        return stretto.Trainer(
            modules(Network(WIDTHS, seed)), nn.functional.cross_entropy,
            lambda params: torch.optim.AdamW(params, lr=lr), method, scheduler=scheduler,
        )  # fmt: skip

    one, further, other = make(0), make(1), make(2, lr=LR / 2)
    for x, y in data[:11]:
        one.step(x, y)
    one.save(tmp_path / "run.pt")
    for x, y in data[:17]:
        further.step(x, y)
    for later in (further, other):
        later.load(tmp_path / "run.pt")
    for x, y in data[11:]:
        assert one.step(x, y) == further.step(x, y) == pytest.approx(other.step(x, y), abs=1e-12)
    assert one.flush() == further.flush() == pytest.approx(other.flush(), abs=1e-12)


@pytest.mark.parametrize("method", thinned([*CURED, "pipedream", "pipedream-2bw", "1f1b", "paci(every=3)"], 5, 4))
def test_a_resumed_run_is_the_run_that_went_on(method, tmp_path):
    """Whatever a cure keeps of the past is in the checkpoint."""
    data = [(torch.tensor(x), torch.tensor(y)) for x, y in batches()[:17]]

    def make(seed):
        return stretto.Trainer(
            modules(Network(WIDTHS, seed)), nn.functional.cross_entropy,
            lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM), method,
        )  # fmt: skip

    one, other = make(0), make(1)
    for x, y in data[:11]:
        one.step(x, y)
    one.save(tmp_path / "run.pt")
    other.load(tmp_path / "run.pt")
    for x, y in data[11:]:
        assert one.step(x, y) == other.step(x, y)
    assert one.flush() == other.flush()
    for a, b in zip(one.stages, other.stages, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


CUT = [
    *[(f"paci(every={every})", async_delay, every, False, None) for every in (1, 2, 3, 4)],
    *[(f"pipemare(microbatches={every}, correct=False)", pb_delay, every, False, None) for every in (1, 3)],
    *[(f"pipemare(microbatches={every})", pb_delay, every, True, None) for every in (1, 2, 3, 4, 12)],
    *[
        (f"pipemare(microbatches={every}, correct={corrects}, reschedule=15)", pb_delay, every, corrects, 15)
        for corrects in (False, True)
        for every in (1, 2, 3, 4, 12)
    ],
]


@pytest.mark.parametrize(("method", "behind", "every", "corrects", "until"), thinned(CUT, 5, first=3))
def test_micro_batches_of_an_update(method, behind, every, corrects, until):
    """The gradient of a minibatch of `every` micro-batches, each forward at its own version, each backward now.

    PipeMare's backward sees the weights tau = `behind / every` updates back along the average of their changes, and its
    step is divided by a power of tau, but never made larger.
    """
    network, data = Network(WIDTHS), batches()
    stages = [list(pair) for pair in network.start]
    versions, velocity = [[list(pair)] for pair in stages], [None] * S
    changes = [[0.0, 0.0] for _ in stages]
    losses = []

    def now(s, t):
        span = behind(s) / every if corrects else 0
        return [w - span * change for w, change in zip(versions[s][t], changes[s], strict=True)]

    for t, (x, y) in enumerate(data):
        sums, loss = [0.0] * S, 0.0
        for i, (part, labels) in enumerate(zip(np.array_split(x, every), np.array_split(y, every), strict=True)):
            # between the forward and the backward of micro-batch m, `behind` others of the stage pass
            m = t * every + i
            seen = [versions[s][max(0, m - behind(s)) // every] for s in range(S)]
            gradients, each = network.gradient(seen, [now(s, t) for s in range(S)], part, labels)
            share = len(part) / len(x)
            loss += share * each
            sums = [[share * g + (h[k] if isinstance(h, list) else 0) for k, g in enumerate(pair)]
                    for pair, h in zip(gradients, sums, strict=True)]  # fmt: skip
        losses.append(loss)
        for s in range(S):
            velocity[s] = (
                sums[s]
                if velocity[s] is None
                else [MOMENTUM * v + g for v, g in zip(velocity[s], sums[s], strict=True)]
            )
            rate = LR if until is None else LR / max(behind(s) / every, 1.0) ** (1 - min(t / until, 1))
            versions[s].append([w - rate * v for w, v in zip(versions[s][-1], velocity[s], strict=True)])
            if behind(s):
                gamma = np.exp(-2 * every / behind(s))
                changes[s] = [
                    gamma * change + (1 - gamma) * (new - old)
                    for change, new, old in zip(changes[s], versions[s][-1], versions[s][-2], strict=True)
                ]
    trainer = stretto.Trainer(
        modules(network), nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM), method,
    )  # fmt: skip
    got = [trainer.step(torch.tensor(x), torch.tensor(y)) for x, y in data]
    got = [loss for loss in got if loss is not None] + trainer.flush()
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-10)
    for each, stage in zip(versions, trainer.stages, strict=True):
        linear = stage if isinstance(stage, nn.Linear) else stage[0]
        np.testing.assert_allclose(linear.weight.detach().numpy(), each[-1][0], rtol=0, atol=1e-10)


def test_a_prediction_that_overshoots_is_warned_of():
    """D = 8 on stage 0 against a momentum of 0.5, gone after two updates."""

    def make(method):
        return stretto.Trainer(modules(Network(WIDTHS)), nn.functional.cross_entropy,
                               lambda params: torch.optim.SGD(params, lr=LR, momentum=0.5), method)  # fmt: skip

    with pytest.warns(UserWarning, match="stage 0 8 updates ahead, but momentum 0.5 is gone after about 2"):
        make("pb-lwp")
    make("pb-lwp(horizon=decayed)")
    for method, updates in (("pb(predict=step)", 8), ("pb-lwpw", 8), ("pipeoptim", 4)):
        with pytest.warns(
            UserWarning, match=f"stage 0 {updates} updates ahead, but momentum 0.4 is gone after about 2"
        ):
            stretto.Trainer(
                modules(Network(WIDTHS)), nn.functional.cross_entropy,
                lambda params: torch.optim.Adam(params, lr=LR, betas=(0.4, 0.9)), method,
            )  # fmt: skip
