"""Law 9, second half: what one turn proves is what running the turns finds out, for sound schedules and broken ones."""

import random
from collections import Counter

import pytest

import stretto
from laws.random_schedules import ANY, CUT, changed, planned, some_plan, with_microbatches
from pairwise import slow_where
from stretto.errors import ScheduleError
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.schedule.dataflow import Tie
from stretto.schedule.validity import proved, run


def turns_of(schedule, rules):
    return 2 * schedule.drain + 3 + rules.lookback


def is_proved(schedule, rules):
    return proved(schedule, rules, turns_of(schedule, rules))


def runs(schedule, rules):
    try:
        run(schedule, rules, turns_of(schedule, rules))
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("num_stages", slow_where(lambda num_stages: num_stages not in (1, 2, 3, 5), range(1, 13)))
def test_every_schedule_of_the_library_is_proved_by_one_turn(num_stages):
    counts = sorted({1, 3, num_stages, num_stages + 5})
    options = [{}, {"reduce": True, "agreement": "A"}, {"agreement": "AM"}, {"agreement": "M"}]
    options += [{"ties": [(0, num_stages - 1)]}] * (num_stages > 1)
    laid = 0
    for method in [*ANY, *(with_microbatches(method, count) for method in CUT for count in counts)]:
        for workers in {(num_stages + 1) // 2, num_stages}:
            plan = planned(method, num_stages, workers, **options[laid % len(options)])
            if plan is not None:
                laid += 1
                assert is_proved(*plan), (method, workers)
    assert laid >= 17


def test_weights_that_are_read_now_and_then():
    for every in range(1, 5):
        assert is_proved(*stretto.method("greedy").plan(4, reads=[(3, 0, every), (3, 2, every)]))
        assert is_proved(*stretto.method("overlapping(delay=1)").plan(4, 2, reads=[(3, 1, every)]))


# -- broken at random -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "number"), [(0, 150), *(pytest.param(seed, 600, marks=pytest.mark.slow) for seed in range(4))]
)
def test_what_one_turn_proves_runs(seed, number):
    """And what runs is proved, but for a few, such as those whose workers number their turns differently."""
    rng = random.Random(seed)
    verdicts = Counter()
    while verdicts.total() < number:
        schedule, rules = some_plan(rng)
        for _ in range(5):
            found = changed(rng, schedule, rules)
            if found is not None and found[0].drain < 20:
                verdict = is_proved(*found), runs(*found)
                assert verdict != (True, False), found
                verdicts[verdict] += 1
    assert verdicts[True, True] > number / 6
    assert verdicts[False, False] > number / 6
    assert verdicts[False, True] < number / 10


# -- what it does not prove -------------------------------------------------------------------------------------------


def schedule(*workers, per_turn=1):
    return Schedule(
        tuple(tuple(Action(t[1], int(t[0]), int(t[2:])) for t in worker.split()) for worker in workers), per_turn
    )


@pytest.mark.parametrize(("found", "reach"), [
    (schedule("0F0 0F1 0B0 0B1 0U1", "1F1 1F0 1B1 1B0 1U1", per_turn=2), (0, 0)),  # a channel out of order
    (schedule("0F0 0B0 0U0 2F0 2B0 2U0", "1F0 1B0 1U0"), (None, None, 2)),  # a cycle through two workers
    (schedule("0F0 0F1 0B0 0B1 0U0", per_turn=2), (0,)),  # an update in the middle of a minibatch
    (schedule("0F0 0B0 0U0"), (None, 1)),  # a stage is missing
])  # fmt: skip
def test_what_is_broken_is_not_proved(found, reach):
    rules = Rules.of(found, Reach(reach))
    assert not is_proved(found, rules)
    assert not runs(found, rules)


def test_a_worker_that_numbers_its_turns_differently_is_run():
    found = schedule("0F-1 0B-1 0U-1", "1F0 1B0 1U0")
    rules = Rules.of(found, Reach((None, 1)))
    assert not is_proved(found, rules)
    assert runs(found, rules)


def test_a_long_period_is_not_unrolled():
    found = schedule("0F0 0B0 0U0", "1F0 1B0 1U0")
    ties = tuple(Tie(1, 0, (2,), trains=False, every=every) for every in (7, 11, 13))
    rules = Rules.of(found, Reach((0, 0)), ties=ties)
    assert not is_proved(found, rules)
