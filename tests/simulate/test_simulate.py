"""A timeline obeys what it was made from: one thing at a time per worker, nothing before what it needs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from laws.pipelines import one_f_one_b, pb_clock
from stretto.errors import ScheduleError
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.simulate import period, simulate, unit_costs


@given(seed=st.integers(0, 10**6), S=st.integers(1, 5), turns=st.integers(1, 6))
def test_every_span_starts_as_early_as_it_may(seed, S, turns):
    generator = random.Random(seed)
    backprop = Reach((*[None] * (S - 1), S - 1))
    found = [stretto.method(name).plan(S, generator.randint(1, S)) for name in ("greedy", "overlapping(delay=1)")]
    found += [(s, Rules.of(s, backprop)) for s in (pb_clock(S), one_f_one_b(S, 3))]
    for schedule, rules in found:
        costs = {}
        timeline = simulate(
            schedule, rules, turns, lambda a, costs=costs: costs.setdefault(a[:2], generator.randint(0, 9))
        )
        end = {span.action: span.end for span in timeline.spans}
        for worker in range(schedule.num_workers):
            mine = [span for span in timeline.spans if span.worker == worker]
            assert [span.action for span in mine] == schedule.unroll(worker, turns)
            free = 0
            for _, action, start, finish in mine:
                assert finish - start == costs[action[:2]]
                arrivals = [end[e.source] for e in rules.needs(action) if e.source.stage >= 0]
                assert start == max([free, *arrivals])
                free = finish
        assert timeline.makespan == max(end.values())
        assert sum(timeline.busy) == sum(span.end - span.start for span in timeline.spans)


def test_unit_costs_are_two_halves():
    assert [unit_costs(Action(kind, 0, 0)) for kind in "FBIWU"] == [1, 2, 1, 1, 0]


DEADLOCKED = Schedule(((Action("F", 0, 0), Action("U", 0, 0), Action("B", 0, 0)),))


def test_a_deadlock_is_an_error_not_an_endless_wait():
    rules = Rules.of(DEADLOCKED, Reach((0,)))
    with pytest.raises(ScheduleError, match="worker 0 waits for 0B0's weight-gradient before 0U0"):
        simulate(DEADLOCKED, rules, 3)


def test_the_period_of_a_deadlock_is_an_error_of_ours():
    with pytest.raises(ScheduleError):
        period(DEADLOCKED, Rules.of(DEADLOCKED, Reach((0,))), unit_costs)
