"""What the observer measures equals what explicit versions of the weights give, and it changes no number."""

from functools import cache

import pytest
import torch
from torch import nn

import stretto
from stretto.simulate import simulate

S, WIDTH, BATCH, LR, START = 4, 6, 8, 0.05, 12
STEPS = START + 2 + 2 * (S - 1)  # those of two minibatches and their delay
WEIGHTS = 8 * WIDTH * (WIDTH + 1)  # bytes of a stage


def stages(num_stages=S):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(num_stages)]


def made(method, modules=None):
    def sgd(params):
        return torch.optim.SGD(params, lr=LR, momentum=0.9)

    return stretto.Trainer(stages() if modules is None else modules, nn.functional.mse_loss, sgd, method)


def batches(steps=STEPS):
    draw = torch.Generator().manual_seed(1)
    shape = BATCH, WIDTH
    return [[torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2)] for _ in range(steps)]


@cache
def watched(method):
    """What is observed of two minibatches from START on, and every version of every stage's weights, flat."""
    trainer = made(method)
    versions, observer = [], None
    for n, (x, y) in enumerate(batches()):
        versions.append([flat(stage) for stage in trainer.stages])  # as many updates as minibatches that are through
        if n == START:
            observer = trainer.observe(2)
        trainer.step(x, y)
    assert observer.done
    return observer.figures(), versions


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def relative(one, other, scale):
    return float((one - other).norm() / scale.norm())


def mean_over_samples(compare):
    return [sum(compare(n, s) for n in (START, START + 1)) / 2 for s in range(S)]


SYNCHRONOUS = ("backprop", "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "greedy", "overlapping")
STASHED = ("pipedream", "pipedream-2bw", "pb(stash=True)", "pb(predict=weight, stash=True)", "overlapping(delay=1)")


@pytest.mark.parametrize("method", [*SYNCHRONOUS, *STASHED])
def test_no_mismatch_where_there_must_be_none(method):
    figures, _ = watched(method)
    assert figures.mismatch == (0.0,) * S


def test_mismatch_of_pipelined_backpropagation():
    figures, versions = watched("pb")

    def by_hand(n, s):  # stage s makes one update a turn from turn 2(S-1-s) on; the turn begins with the forward
        delay = 2 * (S - 1 - s)
        return relative(versions[n][s], versions[n + delay][s], versions[n + delay][s])

    assert figures.mismatch == pytest.approx(mean_over_samples(by_hand), rel=1e-12)
    assert figures.mismatch[0] > 0.01
    assert figures.mismatch[-1] == 0
    assert figures.prediction_error == (None,) * S


def ahead(versions, n, s, horizon):
    return versions[n][s] + horizon * (versions[n][s] - versions[n - 1][s])


@pytest.mark.parametrize("method", ["pb-lwp", "pb-lwpw", "pb-lwp-sc", "pb(predict=velocity, stash=True)"])
def test_prediction_error(method):
    figures, versions = watched(method)

    def by_hand(n, s):
        delay = 2 * (S - 1 - s)
        return relative(ahead(versions, n, s, delay), versions[n + delay][s], versions[n + delay][s])

    def without(n, s):
        delay = 2 * (S - 1 - s)
        return relative(versions[n][s], versions[n + delay][s], versions[n + delay][s])

    assert figures.prediction_error == (*map(pytest.approx, mean_over_samples(by_hand)[:-1]), None)
    assert figures.unpredicted_error == (*map(pytest.approx, mean_over_samples(without)[:-1]), None)
    if "stash" not in method:  # a backward at the end of the horizon reads what was predicted
        assert figures.mismatch[:-1] == pytest.approx(figures.prediction_error[:-1], rel=1e-12)


def test_a_horizon_that_is_not_the_delay():
    figures, versions = watched("pb-lwpw(horizon=3)")

    def by_hand(n, s):
        return relative(ahead(versions, n, s, 3), versions[n + 3][s], versions[n + 3][s])

    assert figures.prediction_error == pytest.approx(mean_over_samples(by_hand), rel=1e-9)


def test_both_passes_predicted():
    figures, versions = watched("spectrain")

    def by_hand(n, s):
        delay = S - 1 - s
        forward, backward = ahead(versions, n, s, s // 2 + delay), ahead(versions, n + delay, s, s // 2)
        return relative(forward, backward, versions[n + delay][s])

    assert figures.mismatch == pytest.approx(mean_over_samples(by_hand), rel=1e-9)


def test_a_corrected_backward():
    figures, versions = watched("pipemare")

    def by_hand(n, s):
        delay = 2 * (S - 1 - s)
        if not delay:
            return 0.0
        gamma, average = torch.exp(torch.tensor(-2.0, dtype=torch.float64)) ** (1 / delay), 0.0
        for k in range(1, n + delay + 1):
            average = gamma * average + (1 - gamma) * (versions[k][s] - versions[k - 1][s])
        return relative(versions[n][s], versions[n + delay][s] - delay * average, versions[n + delay][s])

    assert figures.mismatch == pytest.approx(mean_over_samples(by_hand), rel=1e-9)


COPIES = {  # of a stage's weights in the steady state, the current ones included
    "backprop": lambda s: 1,
    "gpipe": lambda s: 1,
    "pipedream": lambda s: S - s,
    "pb(stash=True)": lambda s: 2 * (S - 1 - s) + 1,
    "pipedream-2bw": lambda s: 2,
    "paci": lambda s: 1,
    "pb": lambda s: 1,
    "pb-sc": lambda s: 1,
    "pb-lwp": lambda s: 1 + (s < S - 1),  # the predicted ones
    "pb-lwpw": lambda s: 1 + 2 * (s < S - 1),  # and those of before the last update
    "pipemare": lambda s: 1 + 2 * (s < S - 1),  # the running average, and the corrected ones while a backward runs
    "spectrain": lambda s: 2 + (s > 1),  # two predictions where the backward looks ahead too
}


@pytest.mark.parametrize("method", COPIES)
def test_weights_held_equal_the_closed_form(method):
    figures, _ = watched(method)
    assert figures.weight_bytes == tuple(WEIGHTS * COPIES[method](s) for s in range(S))


@pytest.mark.parametrize("method", ["backprop", "gpipe", "1f1b", "zb-h1", "pipedream", "pb", "pb-lwp", "pipedream-2bw"])
def test_activations_held_are_those_of_the_forwards_in_flight(method):
    figures, _ = watched(method)
    schedule, rules = stretto.method(method).plan(S)
    forwards = simulate(schedule, rules, 2 * schedule.drain + 2).peak_graphs
    one = BATCH // schedule.per_turn * WIDTH * 8
    assert figures.activation_bytes == tuple(2 * one * n for n in forwards)  # a Linear's input, a Tanh's output


def test_heads_count_as_weights_and_their_losses_as_activations():
    figures, _ = watched("greedy")
    head = 8 * WIDTH * (WIDTH + 1)
    assert figures.weight_bytes == (*[WEIGHTS + head] * (S - 1), WEIGHTS)
    assert figures.activation_bytes == (*[3 * BATCH * WIDTH * 8] * (S - 1), 2 * BATCH * WIDTH * 8)


class Noisy(nn.Module):
    """All that a second forward could disturb."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "method",
    [
        *("backprop", "pipedream", "pb-lwp-sc", "pipemare"),
        *(pytest.param(method, marks=pytest.mark.slow) for method in ("pipedream-2bw", "pb", "spectrain")),
    ],
)
def test_training_is_the_same_with_an_observer(method):
    states = []
    for observed in (False, True):
        torch.manual_seed(3)
        trainer = made(method, [Noisy().double() for _ in range(S)])
        for n, (x, y) in enumerate(batches(24)):
            if observed and n in (0, 2, 9, 17):
                trainer.observe()
            trainer.step(x, y)
        trainer.flush()
        states.append((trainer.gather(), torch.random.get_rng_state()))
    (plain, before), (watched, after) = states
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert torch.equal(before, after)


def test_an_observer_ends_by_itself_and_another_takes_its_place():
    trainer = made("pb")
    for n, (x, y) in enumerate(batches(30)):
        if n == 10:
            first = trainer.observe(1)
        if n == 12:
            second = trainer.observe(1)
        assert (trainer._interpreter.watch is None) == (n < 10 or n > 12 + 2 * (S - 1))
        trainer.step(x, y)
    assert second.done
    assert not first.done
    assert first.figures().mismatch[-1] == 0.0  # seen before it was replaced
    assert first.figures().mismatch[0] is None
    third = trainer.observe()
    third.stop()
    assert trainer._interpreter.watch is None
    assert third.figures().weight_bytes == (0,) * S


def test_stages_without_weights():
    trainer = made("pb", [nn.Tanh(), nn.Linear(WIDTH, WIDTH).double(), nn.Flatten()])
    for n, (x, y) in enumerate(batches(20)):
        if n == 10:
            observer = trainer.observe()
        trainer.step(x, y)
    assert observer.figures().mismatch[::2] == (0.0, 0.0)
    assert observer.figures().weight_bytes == (0, WEIGHTS, 0)


def test_recomputation_trades_activations_for_inputs():
    """Of D + 1 graphs one is left, and D inputs of [N, width]; what is seen of the weights does not change."""
    found = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double() for _ in range(4)]
        trainer = stretto.Trainer(
            stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.01, 0.9),
            stretto.method("pb", stash=True, recompute=recompute and 1),
        )  # fmt: skip
        for step in range(40):
            if step == 20:
                observer = trainer.observe()
            trainer.step(torch.randn(6, 8, dtype=torch.float64), torch.randint(8, (6,)))
        assert observer.done
        found[recompute] = observer.figures()
    assert found[True].mismatch == found[False].mismatch == (0.0, 0.0, 0.0, 0.0)
    assert found[True].weight_bytes == found[False].weight_bytes
    one, inputs = found[False].activation_bytes[0] // 7, 6 * 8 * 8
    assert found[False].activation_bytes[:3] == (7 * one, 5 * one, 3 * one)
    assert found[True].activation_bytes[:2] == (one + 6 * inputs, one + 4 * inputs)  # the graph's own is among them


def test_a_phase_ends_an_observation():
    stages = [nn.Linear(4, 4) for _ in range(3)]
    trainer = stretto.Trainer(
        stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.01, 0.9), "pb-lwp(warmup=4)"
    )
    observer = trainer.observe(minibatches=9)
    for step in range(6):
        assert observer.watching == (step < 5)
        trainer.step(torch.randn(6, 4), torch.randint(4, (6,)))
    assert observer.figures().mismatch == (0.0, 0.0, 0.0)
