"""Messages that are late now and then, and forwards that run ahead against it."""

import math
from itertools import product
from statistics import fmean

import pytest

from pairwise import in_turn
from stretto.errors import UsageError
from stretto.methods import method
from stretto.schedule import check
from stretto.simulate import Link, Network, simulate
from stretto.simulate.network import LATE_DRAWS, Mean

JITTER = Link(0.1, late_share=0.1, late_time=4.0)


def makespan(name, stages, link, turns=1, seed=0, workers=None):
    schedule, rules = method(name).plan(stages, workers)
    return simulate(schedule, rules, turns, network=Network(link, seed=seed)).makespan


def test_the_same_seed_makes_the_same_messages_late():
    name = "1f1b(microbatches=8)"
    seconds = [makespan(name, 4, JITTER, 5, seed) for seed in range(8)]
    assert seconds == [makespan(name, 4, JITTER, 5, seed) for seed in range(8)]
    assert len({*seconds}) > 4


def test_more_turns_leave_the_first_ones_as_they_are():
    schedule, rules = method("1f1b(microbatches=4)").plan(3)
    few, many = (simulate(schedule, rules, turns, network=Network(JITTER, seed=3)) for turns in (3, 9))
    assert few.spans == many.spans[: len(few.spans)]


def test_all_late_is_a_longer_latency_and_none_late_is_none():
    for name in ("1f1b(microbatches=5)", "pb", "gpipe(microbatches=3)"):
        all_late = makespan(name, 3, Link(0.5, late_share=1.0, late_time=2.0), 4)
        assert all_late == pytest.approx(makespan(name, 3, Link(2.5), 4))
        assert makespan(name, 3, Link(0.5, late_share=0.0, late_time=2.0), 4) == makespan(name, 3, Link(0.5), 4)


def test_the_share_of_late_messages():
    """One message a turn upwards and one back, of which each makes a turn of the only micro-batch longer."""
    turns, seeds = 200, range(20)
    mean = fmean(makespan("1f1b(microbatches=1)", 2, JITTER, turns, seed) for seed in seeds) / turns
    on_time = makespan("1f1b(microbatches=1)", 2, Link(0.1), turns) / turns
    assert mean - on_time == pytest.approx(2 * 0.1 * 4.0, rel=0.05)


def two_stages(late, latency=0.1):
    """When 1F1B ends, of two micro-batches on two stages, F = 1, B = 2. `late` has the delay of each message."""
    up, down, upper = (1 + latency + late[0], 2 + latency + late[1]), [], 0.0
    for arrived in up:  # stage 1 does F0 B0 F1 B1
        upper = max(upper, arrived) + 3
        down.append(upper + latency)
    lower = 2.0
    for arrived, more in zip(down, late[2:], strict=True):
        lower = max(lower, arrived + more) + 2
    return max(lower, upper)


def test_the_standard_error_is_that_of_all_cases():
    """The four messages of a minibatch in all 2^4 cases, each with its probability: so exact mean and deviation."""
    share, time, draws = 0.3, 4.0, 160
    cases = {late: share ** sum(late) * (1 - share) ** (4 - sum(late)) for late in product((0, 1), repeat=4)}
    ends = {late: two_stages([time * each for each in late]) for late in cases}
    exact = sum(ends[late] * chance for late, chance in cases.items())
    deviation = math.sqrt(sum((ends[late] - exact) ** 2 * chance for late, chance in cases.items()))
    link = Link(0.1, late_share=share, late_time=time)
    drawn = [makespan("1f1b(microbatches=2)", 2, link, seed=seed) for seed in range(draws)]
    assert {round(end, 9) for end in drawn} == {round(end, 9) for end in ends.values()}
    mean = Mean.of(drawn)
    assert mean.error == pytest.approx(deviation / math.sqrt(draws), rel=0.1)
    assert abs(mean.value - exact) < 3 * mean.error
    inside = sum(
        abs(few.value - exact) < 2 * few.error
        for few in (Mean.of(drawn[at : at + LATE_DRAWS]) for at in range(0, draws, LATE_DRAWS))
    )
    assert inside / (draws / LATE_DRAWS) > 0.8  # of 20 means of eight; 0.91 with normal times


def test_links_that_cannot_be():
    with pytest.raises(UsageError, match="late_time=-1 of a link: a time is 0 or more"):
        Link(late_share=0.5, late_time=-1)
    with pytest.raises(UsageError, match="late_share=2 of a link: a share is from 0 to 1"):
        Link(late_share=2)


SHAPES = [(2, 4), (3, 8), (4, 6), (4, 16), (5, 5), (8, 24)]


@pytest.mark.parametrize(("shape", "latency"), in_turn(SHAPES, [0.0, 0.5, 2.0, 7.0], rounds=4, slow=3))
def test_running_ahead_is_never_slower_on_equal_stages(shape, latency):
    stages, microbatches = shape
    seconds = [
        makespan(f"1f1b(microbatches={microbatches}, ahead={ahead})", stages, Link(latency)) for ahead in range(5)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_running_ahead_holds_as_many_more():
    """For each worker above, and no more than all micro-batches."""
    for ahead in range(5):
        schedule, rules = method(f"1f1b(microbatches=6, ahead={ahead})").plan(4)
        check(schedule, rules)
        assert simulate(schedule, rules, 1).peak_activations == tuple(
            min(6, (3 - s) * (1 + ahead) + 1) for s in range(4)
        )


@pytest.mark.parametrize("draws", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_running_ahead_pays_where_messages_are_late_now_and_then(draws):
    """One in ten messages late by more than a forward and a backward: 4 stages, 16 micro-batches, mean of the draws."""
    means = [
        fmean(makespan(f"1f1b(microbatches=16, ahead={ahead})", 4, JITTER, 6, seed) for seed in range(draws))
        for ahead in (0, 1, 2)
    ]
    assert means == sorted(means, reverse=True)
    assert means[2] < 0.8 * means[0]
