"""Goodput: the closed form against jobs that fail event by event, and the interval that is best."""

import math
import random

import pytest

from stretto.plan.reliability import best_interval, goodput

CASES = {  # mtbf of the job, interval, checkpoint, restart
    "failures are rare": (10_000.0, 400.0, 10.0, 60.0),
    "a failure in every second interval": (500.0, 300.0, 30.0, 100.0),
    "restarts fail as well": (50.0, 20.0, 5.0, 60.0),
    "checkpoints take longer than work": (100.0, 10.0, 30.0, 5.0),
    "restarts take no time": (200.0, 50.0, 1.0, 0.0),
}


def job(dice, workers, mtbf, interval, checkpoint, restart, segments):
    """The seconds of each segment, interval and checkpoint, of a job; each of its workers fails on its own.

    A worker's clock runs while the job restarts, too. One that has failed is replaced by a new one.
    """
    now, seconds = 0.0, []
    fails_at = [dice.expovariate(1 / (mtbf * workers)) for _ in range(workers)]
    for _ in range(segments):
        begin, left = now, interval + checkpoint
        while left > 0:
            failed = min(range(workers), key=fails_at.__getitem__)
            if now + left <= fails_at[failed]:
                now, left = now + left, 0.0
                continue
            now = fails_at[failed]
            fails_at[failed] = now + dice.expovariate(1 / (mtbf * workers))
            left = restart + interval + checkpoint  # a failure while it restarts lets it restart again
        seconds.append(now - begin)
    return seconds


@pytest.mark.parametrize("case", CASES)
def test_jobs_that_fail_event_by_event(case):
    """Independent of the closed form: workers with clocks of their own. Within four standard errors of the mean."""
    mtbf, interval, checkpoint, restart = CASES[case]
    seconds = job(random.Random(case), 3, mtbf, interval, checkpoint, restart, segments=8000)
    mean = sum(seconds) / len(seconds)
    error = math.sqrt(sum((each - mean) ** 2 for each in seconds) / len(seconds) / (len(seconds) - 1))
    expected = interval / goodput(interval, mtbf=mtbf, checkpoint=checkpoint, restart=restart)
    assert abs(mean - expected) < 4 * error
    assert error < 0.05 * expected


def test_nothing_is_lost_without_failures():
    assert goodput(math.inf, mtbf=math.inf, checkpoint=9.0, restart=9.0) == 1
    assert best_interval(math.inf, 9.0) == math.inf
    assert goodput(90.0, mtbf=math.inf, checkpoint=10.0, restart=9.0) == 0.9
    rare = [
        goodput(best_interval(mtbf, 10.0), mtbf=mtbf, checkpoint=10.0, restart=60.0) for mtbf in (1e3, 1e6, 1e9, 1e12)
    ]
    assert rare == sorted(rare)
    assert 1 - 1e-5 < rare[-1] < 1


@pytest.mark.parametrize("checkpoint", [0.01, 1.0, 60.0, 5000.0])
def test_goodput_falls_with_workers(checkpoint):
    """At the best interval, at a fixed one, and at any restart time."""
    for interval in (None, 600.0):
        shares = [
            goodput(interval or best_interval(mtbf, checkpoint), mtbf=mtbf, checkpoint=checkpoint, restart=300.0)
            for mtbf in (5e7 / workers for workers in (1, 10, 100, 1000, 10_000, 100_000))
        ]
        assert shares == sorted(shares, reverse=True)
        assert all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("checkpoint", [1e-6, 0.1, 10.0, 600.0, 30_000.0])
@pytest.mark.parametrize("mtbf", [300.0, 10_000.0, 1e6])
def test_the_best_interval_is_a_maximum(mtbf, checkpoint):
    best = best_interval(mtbf, checkpoint)
    at_best = goodput(best, mtbf=mtbf, checkpoint=checkpoint, restart=60.0)
    for factor in (0.25, 0.9, 0.999, 1.001, 1.1, 4.0):
        assert goodput(factor * best, mtbf=mtbf, checkpoint=checkpoint, restart=60.0) <= at_best


def test_published_approximations():
    """Daly's estimate, and his three examples: 24 h, 6 h and 15 min of MTBF, dumps of 5 min: 117, 57 and 9.1 min."""
    for mtbf, minutes in ((24 * 60, 117), (6 * 60, 57), (15, 9.1)):
        assert best_interval(60.0 * mtbf, 300.0) / 60 == pytest.approx(minutes, rel=0.01)
    for ratio in (1e-6, 1e-4, 1e-2, 0.1, 0.5):
        half = ratio / 2  # checkpoint over twice the MTBF
        daly = math.sqrt(2 * ratio) * (1 + math.sqrt(half) / 3 + half / 9) - ratio
        assert best_interval(1.0, ratio) == pytest.approx(daly, rel=6e-3)
    assert best_interval(1.0, 1e-8) == pytest.approx(math.sqrt(2e-8), rel=1e-3)  # Young's


def test_a_job_that_never_gets_anywhere():
    assert goodput(1e6, mtbf=1.0, checkpoint=1.0, restart=1.0) == 0
