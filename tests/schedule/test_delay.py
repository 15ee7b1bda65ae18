"""Delays counts a stage's updates between two of its actions at once: as many as there are turn by turn."""

import random

import pytest

from laws.random_schedules import changed, some_plan
from pairwise import slow_where
from stretto.errors import ScheduleError
from stretto.schedule import Action, Delays, Schedule


def when(order, per_turn, kinds, microbatch):
    """The turn and the place in its stage's order at which a micro-batch's action runs."""
    for place, action in enumerate(order):
        turns, rest = divmod(microbatch - action.microbatch, per_turn)
        if action.kind in kinds and rest == 0:
            return turns, place
    raise ScheduleError(f"no {kinds}")


def counted(schedule, stage, microbatch, since):
    """The updates between a forward (or recompute) and its backward, turn by turn."""
    order, per_turn = schedule.of_stage(stage), schedule.per_turn
    start, end = when(order, per_turn, since, microbatch), when(order, per_turn, "BW", microbatch)
    return sum(
        start < (n, place) < end and n * per_turn + action.microbatch >= 0
        for n in range(start[0], end[0] + 1)
        for place, action in enumerate(order)
        if action.kind == "U"
    )


def compare(schedule):
    """Whether Delays agrees with counting, or neither can count; True where they could."""
    per_turn = schedule.per_turn
    stages = range(schedule.num_stages)
    full = [(2 - min(a.microbatch // per_turn for a in schedule.of_stage(s))) * per_turn for s in stages]
    try:
        expected = [[counted(schedule, s, m, "F") for m in range(full[s] + per_turn)] for s in stages]
    except ScheduleError:
        with pytest.raises(ScheduleError, match="for micro-batch"):
            Delays(schedule)
        return False
    delays = Delays(schedule)
    assert [[delays.at(s, m) for m in range(full[s] + per_turn)] for s in stages] == expected
    assert delays.steady == tuple(max(at[-per_turn:]) for at in expected)
    assert delays.mean == tuple(sum(at[-per_turn:]) / per_turn for at in expected)
    recomputing = [s for s in stages if any(action.kind == "C" for action in schedule.of_stage(s))]
    for s in recomputing:
        try:
            again = [counted(schedule, s, m, "C") for m in range(full[s] + per_turn)]
        except ScheduleError:
            continue
        assert [delays.recompute_at(s, m) for m in range(full[s] + per_turn)] == again
    return True


@pytest.mark.parametrize("seed", slow_where(bool, range(2)))
def test_as_many_as_turn_by_turn(seed):
    """For schedules of the library and for changed ones, whose order may be odd."""
    rng = random.Random(seed)
    could = 0
    for _ in range(60):
        plan = some_plan(rng)
        assert compare(plan[0])
        for _ in range(3):
            found = changed(rng, *plan)
            could += found is not None and found[0].drain < 20 and compare(found[0])
    assert could > 60


def test_a_large_delay_is_counted_at_once():
    behind = 10**9
    schedule = Schedule(((Action("F", 0, 0), Action("B", 0, -behind), Action("U", 0, -behind)),))
    assert Delays(schedule).steady == (behind,)
    assert Delays(schedule).at(0, 10**6) == 10**6
