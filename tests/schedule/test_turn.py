"""The turn form carries pipelines: unrolled, it is the published list, fill and drain included.

Three stages, F = 1, B = 2, updates take no time; digits are forwards, letters backwards (a belongs to 0). The tests
below compare with these pictures, character by character.

    PB clock                   asynchronous 1F1B          GPipe                 1F1B
    2 ..0aa1bb2cc3dd4ee5ff.... 2 ..0aa1bb2cc3dd4ee5ff.... 2 ..0123aabbccdd....  2 ..0aa1bb2cc3dd....
    1 .012.aa3bb4cc5dd.ee.ff.. 1 .01..aa2bb3cc4dd5ee.ff.. 1 .0123...aabbccdd..  1 .01..aa2bb3cc.dd..
    0 01234..aa5bb.cc.dd.ee.ff 0 012....aa3bb4cc5dd.ee.ff 0 0123......aabbccdd  0 012....aa3bb.cc.dd
"""

from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.pipelines import async_1f1b, delayed, gpipe, one_f_one_b, pb_clock
from stretto.schedule import Action, Delays, Reach, Rules, check
from stretto.simulate import simulate

PICTURES = {
    pb_clock: """\
2 ..0aa1bb2cc3dd4ee5ff....
1 .012.aa3bb4cc5dd.ee.ff..
0 01234..aa5bb.cc.dd.ee.ff""",
    async_1f1b: """\
2 ..0aa1bb2cc3dd4ee5ff....
1 .01..aa2bb3cc4dd5ee.ff..
0 012....aa3bb4cc5dd.ee.ff""",
    gpipe: """\
2 ..0123aabbccdd....
1 .0123...aabbccdd..
0 0123......aabbccdd""",
    one_f_one_b: """\
2 ..0aa1bb2cc3dd....
1 .01..aa2bb3cc.dd..
0 012....aa3bb.cc.dd""",
}


def rules(schedule):
    S = schedule.num_stages
    return Rules.of(schedule, Reach((*[None] * (S - 1), S - 1)))


def draw(timeline):
    rows = [["."] * int(timeline.makespan) for _ in range(timeline.schedule.num_workers)]
    for worker, (kind, _, microbatch), start, end in timeline.spans:
        mark = str(microbatch) if kind == "F" else ascii_lowercase[microbatch]
        rows[worker][int(start) : int(end)] = mark * int(end - start)
    return "\n".join(f"{worker} {''.join(row)}" for worker, row in reversed(list(enumerate(rows))))


@pytest.mark.parametrize(("family", "turns"), [(pb_clock, 6), (async_1f1b, 6), (gpipe, 1), (one_f_one_b, 1)])
def test_pictures(family, turns):
    schedule = family(3) if turns > 1 else family(3, 4)
    assert draw(simulate(schedule, rules(schedule), turns)) == PICTURES[family]
    assert all(line in __doc__ for line in PICTURES[family].splitlines())


# -- the published lists, written down without the turn form --------------------------------------------------------


def pb_ticks(S, s, N):
    """At tick t: the forward of t-s, then the backward of t-(2(S-1)-s), then its update."""
    for t in range(N + 2 * S):
        if 0 <= t - s < N:
            yield Action("F", s, t - s)
        if 0 <= t - (2 * (S - 1) - s) < N:
            yield Action("B", s, t - (2 * (S - 1) - s))
            yield Action("U", s, t - (2 * (S - 1) - s))


def pipedream_list(S, s, N):
    """S-1-s forwards to warm up, then one forward and one backward in turn, then the backwards that are left."""
    forwards, backwards = list(range(N)), list(range(N))
    for _ in range(min(S - 1 - s, N)):
        yield Action("F", s, forwards.pop(0))
    while backwards:
        if forwards:
            yield Action("F", s, forwards.pop(0))
        m = backwards.pop(0)
        yield Action("B", s, m)
        yield Action("U", s, m)


def gpipe_list(S, s, M, minibatches):
    for first in range(0, M * minibatches, M):
        yield from [Action("F", s, first + i) for i in range(M)]
        yield from [Action("B", s, first + i) for i in range(M)]
        yield Action("U", s, first + M - 1)


def one_f_one_b_list(S, s, M, minibatches):
    """PipeDream-Flush as Megatron-LM lists it: S-1-s warm-up forwards, steady pairs, cool-down."""
    for first in range(0, M * minibatches, M):
        warmup = min(S - 1 - s, M)
        yield from [Action("F", s, first + i) for i in range(warmup)]
        for i in range(M - warmup):
            yield Action("F", s, first + warmup + i)
            yield Action("B", s, first + i)
        yield from [Action("B", s, first + i) for i in range(M - warmup, M)]
        yield Action("U", s, first + M - 1)


@given(S=st.integers(1, 7), N=st.integers(1, 20))
def test_asynchronous_lists(S, N):
    for family, published in ((pb_clock, pb_ticks), (async_1f1b, pipedream_list)):
        schedule = family(S)
        for s in range(S):
            assert schedule.unroll(s, N) == list(published(S, s, N))


@given(S=st.integers(1, 7), M=st.integers(1, 9), N=st.integers(1, 4))
def test_synchronous_lists(S, M, N):
    for family, published in ((gpipe, gpipe_list), (one_f_one_b, one_f_one_b_list)):
        schedule = family(S, M)
        assert schedule.drain == 0
        for s in range(S):
            assert schedule.unroll(s, N) == list(published(S, s, M, N))


@given(S=st.integers(1, 7))
def test_delays_and_memory_of_asynchronous_pipelines(S):
    for family, delay, held in (
        (pb_clock, lambda s: 2 * (S - 1 - s), lambda s: 2 * (S - 1 - s) + 1),
        (async_1f1b, lambda s: S - 1 - s, lambda s: S - s),
    ):
        schedule = family(S)
        check(schedule, rules(schedule))
        delays = Delays(schedule)
        assert delays.steady == tuple(delay(s) for s in range(S))
        for s in range(S):  # in the fill, only the updates that have happened count
            assert [delays.at(s, m) for m in range(30)] == [min(m, delay(s)) for m in range(30)]
        assert simulate(schedule, rules(schedule), 30).peak_graphs == tuple(held(s) for s in range(S))


@given(S=st.integers(1, 7), M=st.integers(1, 9), minibatches=st.integers(1, 3))
def test_bubble_delays_and_memory_of_synchronous_pipelines(S, M, minibatches):
    for family, held in ((gpipe, lambda s: M), (one_f_one_b, lambda s: min(M, S - s))):
        schedule = family(S, M)
        check(schedule, rules(schedule))
        assert Delays(schedule).steady == (0,) * S
        assert {Delays(schedule).at(s, m) for s in range(S) for m in range(3 * M)} == {0}
        timeline = simulate(schedule, rules(schedule), 1)
        assert timeline.peak_graphs == tuple(held(s) for s in range(S))
        assert timeline.makespan == 3 * (M + S - 1)
        assert timeline.bubble == pytest.approx((S - 1) / (M + S - 1))
        assert simulate(schedule, rules(schedule), minibatches).peak_graphs == timeline.peak_graphs


@given(D=st.lists(st.integers(0, 6), min_size=1, max_size=5), N=st.integers(1, 12))
def test_a_turn_leaves_out_what_has_not_entered_and_what_is_finished(D, N):
    """Whether drained at once or with a stop in between, every micro-batch is done once, in the same order per kind."""
    schedule = delayed(D)
    assert schedule.drain == max(D)
    for s in range(len(D)):
        whole = schedule.unroll(s, N)
        for kind in "FBU":
            assert [a.microbatch for a in whole if a.kind == kind] == list(range(N))
        for stop in range(1, N):
            parts = [a for n in range(stop + schedule.drain) for a in schedule.turn(s, n, stop)]
            parts += [a for n in range(stop, N + schedule.drain) for a in schedule.turn(s, n, N, since=stop)]
            assert sorted(parts) == sorted(whole)
