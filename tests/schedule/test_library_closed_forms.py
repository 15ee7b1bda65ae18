"""Laws 3, 4 and 9 for the library: time, bubble and memory are the closed forms, delays the published ones."""

import random
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairwise import slow_where
from stretto.methods import method
from stretto.schedule import Action, Delays, Reach, Rules, check
from stretto.schedule.library.dualpipe_v import dualpipe_v
from stretto.schedule.library.gpipe import gpipe
from stretto.schedule.library.interleaved import interleaved, looped_bfs
from stretto.schedule.library.one_f_one_b import one_f_one_b
from stretto.schedule.library.pipedream import paci, pipedream, pipedream_2bw, pipelined_backprop
from stretto.schedule.library.zero_bubble import zb_h1, zb_h2, zb_v
from stretto.schedule.validity import complete, run_dry
from stretto.simulate import period, simulate

COST = st.integers(1, 9)


def rules(schedule):
    S = schedule.num_stages
    return Rules.of(schedule, Reach((*[None] * (S - 1), S - 1)))


def run(schedule, turns=1, F=1, I=1, W=1):  # noqa: E741
    costs = {"F": F, "I": I, "W": W, "B": I + W, "U": 0}
    return simulate(schedule, rules(schedule), turns, lambda action: costs[action.kind])


def held_by_workers(timeline):
    """The most forwards each worker held at once for their backward."""
    change = {"F": 1, "B": -1, "W": -1, "I": 0, "U": 0}
    steps = [[change[s.action.kind] for s in timeline.spans if s.worker == w] for w in range(len(timeline.busy))]
    return [max(accumulate(own)) for own in steps]


def idle_inside(timeline):
    """Time between each worker's first and last action in which it does nothing."""
    spans = [[span for span in timeline.spans if span.worker == w] for w in range(len(timeline.busy))]
    return [own[-1].end - own[0].start - busy for own, busy in zip(spans, timeline.busy, strict=True)]


# -- synchronous ----------------------------------------------------------------------------------------------------


@given(workers=st.integers(1, 6), each=st.integers(1, 3), M=st.integers(1, 9), F=COST, I=COST, W=COST)
def test_gpipe_and_1f1b(workers, each, M, F, I, W):  # noqa: E741
    """Neighbouring stages on one worker are one longer stage."""
    for family, held in ((gpipe, lambda w: M), (one_f_one_b, lambda w: min(M, workers - w))):
        schedule = family(workers * each, workers, M)
        timeline = run(schedule, 1, F, I, W)
        assert timeline.makespan == (M + workers - 1) * each * (F + I + W)
        assert timeline.bubble == pytest.approx((workers - 1) / (M + workers - 1))
        assert timeline.peak_graphs == tuple(held(w) for w in range(workers) for _ in range(each))


@given(seed=st.integers(0, 10**6), S=st.integers(1, 6), M=st.integers(1, 8))
def test_gpipe_with_stages_of_any_cost(seed, S, M):
    """Two flow shops, up and down: every stage once, and the slowest M-1 times more."""
    generator = random.Random(seed)
    f, b = ([generator.randint(0, 20) for _ in range(S)] for _ in range(2))
    schedule = gpipe(S, S, M)
    timeline = simulate(schedule, rules(schedule), 1, lambda a: {"F": f, "B": b, "U": [0] * S}[a.kind][a.stage])
    assert timeline.makespan == sum(f) + sum(b) + (M - 1) * (max(f) + max(b))


@given(W=st.integers(1, 5), v=st.integers(2, 4), rounds=st.integers(1, 4), F=COST, B=COST)
def test_interleaved(W, v, rounds, F, B):
    """A chunk costs F and B; idle/ideal = (W-1)/(vM); the memory is W (1 + (W-1)/(Wv)) workers' worth of stages."""
    M = rounds * W
    timeline = run(interleaved(v * W, W, M), 1, F, B, 0)
    assert timeline.makespan == (v * M + W - 1) * (F + B)
    assert timeline.makespan / (v * M * (F + B)) - 1 == pytest.approx((W - 1) / (v * M))
    held = [(v - 1) * W + 2 * (W - 1 - w) + 1 for w in range(W)]
    assert held_by_workers(timeline) == [min(v * M, most) for most in held]
    assert held[0] / v == pytest.approx(W * (1 + (W - 1) / (W * v)))


@given(W=st.integers(1, 5), v=st.integers(1, 4), more=st.integers(0, 5), F=COST, B=COST)
def test_looped_breadth_first(W, v, more, F, B):
    M = W + more
    timeline = run(looped_bfs(v * W, W, M), 1, F, B, 0)
    assert timeline.makespan == (v * M + W - 1) * (F + B)
    assert timeline.peak_graphs == (M,) * (v * W)


@given(S=st.integers(1, 7), more=st.integers(0, 9), F=COST, I=COST, W=COST)
def test_zb_h1(S, more, F, I, W):  # noqa: E741
    """(S-1)(F+B-2W), B the whole backward, where W takes no longer than F and I; 1F1B's memory."""
    M, W = S + more, min(F, I, W)
    timeline = run(zb_h1(S, S, M), 1, F, I, W)
    assert timeline.makespan == M * (F + I + W) + (S - 1) * (F + (I + W) - 2 * W)
    assert max(held_by_workers(timeline)) <= max(run(one_f_one_b(S, S, M)).peak_graphs)


@given(S=st.integers(1, 6), more=st.integers(0, 6), F=COST, I=COST, W=COST)
def test_zb_h2(S, more, F, I, W):  # noqa: E741
    """Qi et al. 2024, table 1: (S-1)(F+B-3W), B the whole backward, and activations of 2S-1; none where F = I = W."""
    schedule = zb_h2(S, S, 2 * S - 1 + more)
    timeline = run(schedule, 1, F, I, W)
    work = (2 * S - 1 + more) * (F + I + W)
    costs = {"F": F, "I": I, "W": W, "B": I + W, "U": 0}
    found = period(schedule, rules(schedule), lambda action: costs[action.kind])
    assert found == work + (S - 1) * max(0, F + I - 2 * W, I - F)
    assert max(held_by_workers(timeline)) == 2 * S - 1
    if F == I == W:
        assert idle_inside(timeline) == [0] * S


@given(W=st.integers(1, 5), more=st.integers(0, 6), unit=COST)
def test_dualpipe_v(W, more, unit):
    """F = I = W: as long as zb-v; one activation more a worker than its memory."""
    M = 2 * W + more
    timeline = run(dualpipe_v(2 * W, W, M), 1, unit, unit, unit)
    assert timeline.makespan == (6 * M + W - 1) * unit
    assert timeline.peak_activations == (2 * W + 1,) * W
    assert timeline.peak_graphs == tuple(2 * W - s for s in range(2 * W))


@given(W=st.integers(1, 7), more=st.integers(0, 9), unit=COST)
def test_zb_v(W, more, unit):
    """F = I = W: no worker idles between its first and its last action; 1F1B's memory, two stages a worker."""
    M = 2 * W - 1 + more
    timeline = run(zb_v(2 * W, W, M), 1, unit, unit, unit)
    assert timeline.makespan == (6 * M + W - 1) * unit
    assert idle_inside(timeline) == [0] * W
    assert max(held_by_workers(timeline)) <= 2 * W


@given(S=st.integers(1, 9), workers=st.integers(1, 9), M=st.integers(1, 12), F=COST, I=COST, W=COST)
def test_splitting_the_backward_costs_no_memory_and_among_equals_no_time(S, workers, M, F, I, W):  # noqa: E741
    workers = min(S, workers)
    split, whole = run(zb_h1(S, workers, M), 1, F, I, W), run(one_f_one_b(S, workers, M), 1, F, I, W)
    assert S % workers or split.makespan <= whole.makespan
    assert max(held_by_workers(split)) <= max(held_by_workers(whole))


# -- without end ----------------------------------------------------------------------------------------------------


def endless(S, workers, M):
    return pipedream(S, workers), pipelined_backprop(S, workers), paci(S, workers, M), pipedream_2bw(S, workers, S + M)


@given(seed=st.integers(0, 10**6), S=st.integers(1, 6), workers=st.integers(1, 6), M=st.integers(1, 4))
def test_no_bubble_once_full(seed, S, workers, M):
    """The slowest worker never waits, whatever the stages cost. Updates that come in every turn may cost, too."""
    generator = random.Random(seed)
    for number, schedule in enumerate(endless(S, min(S, workers), M)):
        costs = {(kind, s): generator.randint(0, 20) for kind in "FBU" for s in range(S)}
        if number > 1:
            costs.update({("U", s): 0 for s in range(S)})
        work = [sum(costs[a.kind, a.stage] for a in actions) for actions in schedule.body]
        assert period(schedule, rules(schedule), lambda a, costs=costs: costs[a.kind, a.stage]) == max(work)


@given(S=st.integers(1, 8), workers=st.integers(1, 8), M=st.integers(1, 6))
def test_what_endless_pipelines_hold(S, workers, M):
    clock, ahead = tuple(2 * (S - 1 - s) + 1 for s in range(S)), tuple(S - s for s in range(S))
    for schedule, held in zip(endless(S, min(S, workers), M), (ahead, clock, ahead, ahead), strict=True):
        assert run(schedule, 2 * S + 2).peak_graphs == held


# -- delays ---------------------------------------------------------------------------------------------------------


@given(S=st.integers(1, 8), workers=st.integers(1, 8), M=st.integers(1, 10))
def test_delays(S, workers, M):
    workers = min(S, workers)
    stages = range(S)
    assert Delays(pipelined_backprop(S, workers)).steady == tuple(2 * (S - 1 - s) for s in stages)
    assert Delays(pipedream(S, workers)).steady == tuple(S - 1 - s for s in stages)
    assert Delays(pipedream_2bw(S, workers, S + M)).steady == tuple(min(1, S - 1 - s) for s in stages)
    assert Delays(paci(S, workers, M)).steady == tuple(-(-(S - 1 - s) // M) for s in stages)
    assert max(Delays(paci(S, workers, M)).steady) <= -(-(S - 1) // M)
    assert Delays(paci(S, workers, M)).mean == tuple((S - 1 - s) / M for s in stages)
    assert Delays(pipelined_backprop(S, workers, M)).mean == tuple(2 * (S - 1 - s) / M for s in stages)
    for family in (gpipe, one_f_one_b, zb_h1):
        assert Delays(family(S, workers, M)).steady == (0,) * S
    for family in (looped_bfs, interleaved):
        assert Delays(family(2 * workers, workers, workers * M)).steady == (0,) * 2 * workers
    assert Delays(zb_v(2 * workers, workers, M)).steady == (0,) * 2 * workers


def clock(S, ticks):
    """Every tick of Pipelined Backpropagation's clock, on stage s: F of t-s, B of t-(2(S-1)-s), U of the same."""
    for t in range(ticks):
        yield [
            [Action(kind, s, m) for kind, m in (("F", t - s), ("B", t - back), ("U", t - back)) if m >= 0]
            for s, back in enumerate(range(2 * (S - 1), S - 2, -1))
        ]


@pytest.mark.parametrize("S", range(1, 12))
def test_the_clock_of_pipelined_backpropagation(S):
    """Tick by tick what the schedule lists; and nothing in a tick needs what another stage makes in the same tick."""
    schedule, ticks = pipelined_backprop(S, S), 5 * S + 3
    listed, earlier = [[] for _ in range(S)], set()
    for tick in clock(S, ticks):
        for s, actions in enumerate(tick):
            for kind, _, m in actions:
                needed = {"F": ("F", s - 1, m), "B": ("B", s + 1, m)}.get(kind)
                assert needed is None or needed[1] in (-1, S) or needed in earlier, (s, kind, m)
            listed[s] += actions
        earlier.update(action for actions in tick for action in actions)
    for s in range(S):
        unrolled = [action for n in range(ticks) for action in schedule.turn(s, n)]
        assert unrolled[: len(listed[s])] == listed[s]
        delays = Delays(schedule)  # updates of the stage between F and B, counted on the clock
        for m in range(ticks - 2 * S):
            start, end = listed[s].index(("F", s, m)), listed[s].index(("B", s, m))
            assert [a.kind for a in listed[s][start:end]].count("U") == delays.at(s, m) == min(m, 2 * (S - 1 - s))


@pytest.mark.parametrize("every", range(1, 10))
def test_delays_of_paci(every):
    """The backward of m follows the forward of m + S-1-s; updates follow backwards a-1, 2a-1, ...

    So the delay is floor(m/a) - floor((m-(S-1-s))/a): for every micro-batch the quotient (S-1-s)/a, rounded up or down.
    """
    for S in range(1, 14):
        delays = Delays(paci(S, S, every))
        for s in range(S):
            ahead = S - 1 - s
            seen = [delays.at(s, m) for m in range(ahead + 5 * every)]
            assert seen == [m // every - max(0, m - ahead) // every for m in range(ahead + 5 * every)]
            assert set(seen[ahead:]) == {ahead // every, -(-ahead // every)}
            assert delays.steady[s] == max(seen) == -(-ahead // every)
        assert max(delays.steady) == -(-(S - 1) // every)


@pytest.mark.parametrize("S", range(1, 10))
def test_delays_and_versions_of_the_methods(S):
    """The laws of delay, and the versions held: 1 where nothing is kept, delay + 1 in a stash, two in 2BW."""
    for name, delay, versions in (
        ("pb", lambda s: 2 * (S - 1 - s), lambda s: 1),
        ("pb(stash=True)", lambda s: 2 * (S - 1 - s), lambda s: 2 * (S - 1 - s) + 1),
        ("pipemare", lambda s: 2 * (S - 1 - s), lambda s: 1),
        ("pipedream", lambda s: S - 1 - s, lambda s: S - s),
        ("nesterov", lambda s: S - 1 - s, lambda s: S - s),
        ("spectrain", lambda s: S - 1 - s, lambda s: 1),
        ("pipedream-2bw", lambda s: min(1, S - 1), lambda s: min(2, S)),
        (f"pipedream-2bw(microbatches={S + 3})", lambda s: min(1, S - 1), lambda s: min(2, S)),
        ("paci(every=3)", lambda s: -(-(S - 1 - s) // 3), lambda s: 1),
        ("gpipe", lambda s: 0, lambda s: 1),
        ("1f1b", lambda s: 0, lambda s: 1),
        ("zb-h1", lambda s: 0, lambda s: 1),
    ):
        found = method(name)
        schedule, _ = found.plan(S)
        assert found.delays(schedule).steady == tuple(delay(s) for s in range(S)), name
        assert found.versions(schedule) == tuple(versions(s) for s in range(S)), name


@pytest.mark.parametrize("S", range(1, 7))
def test_updates_of_a_stage_do_not_depend_on_where_it_lives(S):
    for workers in range(1, S + 1):
        for here, alone in zip(endless(S, workers, 3), endless(S, S, 3), strict=True):
            assert [here.of_stage(s) for s in range(S)] == [alone.of_stage(s) for s in range(S)]
        assert paci(S, workers, 1) == pipedream(S, workers)


# -- complete and free of deadlock ----------------------------------------------------------------------------------


WORKERS = slow_where(lambda workers: workers > 3, range(1, 6))


@pytest.mark.parametrize("counts", [(1, 3, 8), pytest.param((2, 4, 7, 12), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("workers", WORKERS)
def test_every_schedule_is_complete_and_free_of_deadlock(workers, counts):
    for S in range(workers, 9):
        for M in counts:
            for family in (gpipe, one_f_one_b, zb_h1, zb_h2, paci):
                check(schedule := family(S, workers, M), rules(schedule))
        for schedule in (pipedream(S, workers), pipelined_backprop(S, workers), pipedream_2bw(S, workers, S + 1)):
            check(schedule, rules(schedule))


@pytest.mark.parametrize("workers", WORKERS)
def test_every_schedule_of_chunks_is_complete_and_free_of_deadlock(workers):
    for M in chain(range(1, workers + 1), range(2 * workers, 5 * workers, workers)):
        for v in (1, 2, 3):
            for family in (interleaved, looped_bfs):
                check(schedule := family(v * workers, workers, M), rules(schedule))
        if 2 * workers <= M:
            check(schedule := dualpipe_v(2 * workers, workers, M), rules(schedule))
        schedule = zb_v(2 * workers, workers, M)
        complete(schedule, rules(schedule), 3)
        run_dry(schedule, rules(schedule), 3, "buffered")
