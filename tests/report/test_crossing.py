"""Where a run crosses a cut-off: interpolated between evaluations, linearly in the metric and in the costs."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.report.frontier import lost
from stretto.report.html import render
from stretto.report.metric import TRAIN_LOSS, VALIDATION_ACCURACY
from stretto.report.panel import crossing, panel
from stretto.report.record import Record
from stretto.report.speedup import speedups

from .synthetic import make_page, point, run


def test_halfway_between_two_evaluations():
    found = crossing(run([2.0, 1.0], costs=[(10.0, 100.0), (20.0, 300.0)]), TRAIN_LOSS, 1.5)
    assert (found.serial_flops, found.total_flops, found.step, found.examples) == (15.0, 200.0, 1.5, 1.5)
    assert found.evaluation.step == 2


def test_exactly_at_an_evaluation_or_before_the_first():
    record = run([2.0, 1.0, 0.5])
    assert crossing(record, TRAIN_LOSS, 1.0).step == 2
    assert crossing(record, TRAIN_LOSS, 5.0).step == 1
    assert crossing(record, TRAIN_LOSS, 0.1) is None


def test_it_is_the_first_crossing_from_the_evaluation_just_before():
    record = run([2.0, 0.8, 3.0, 0.4])
    assert crossing(record, TRAIN_LOSS, 0.8).step == 2
    assert crossing(record, TRAIN_LOSS, 0.5).step == pytest.approx(3 + 2.5 / 2.6), "from 3.0, not from 0.8"


def test_accuracies_rise_and_missing_values_are_passed_over():
    points = [point(step=1, serial=1.0, validation_accuracy=0.2), point(step=2, serial=2.0),
              point(step=3, serial=3.0, validation_accuracy=0.6)]  # fmt: skip
    record = Record(id="a", method="pb", seed=0, options={}, status="finished", points=tuple(points))
    assert crossing(record, VALIDATION_ACCURACY, 0.4).serial_flops == pytest.approx(2.0)


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=6), st.floats(0.01, 9))
def test_it_lies_between_the_evaluations(losses, cutoff):
    found = crossing(run(losses), TRAIN_LOSS, cutoff)
    if min(losses) > cutoff:
        assert found is None
    else:
        after = found.evaluation.step
        assert max(after - 1, 1) <= found.step <= after
        assert losses[after - 1] <= cutoff


def test_the_json_keeps_the_evaluation_and_says_where_it_crossed():
    (data,) = panel([run([2.0, 1.0])], TRAIN_LOSS, 1.5).to_json()["points"]
    assert (data["step"], data["crossed_at"], data["serial_flops"], data["failed_later"]) == (2, 1.5, 1.5, False)


FALLEN = run([2.0, 0.5], method="greedy", status="diverged", diverged_at=3, costs=[(0.5, 0.5), (1.0, 1.0)])
RISEN = replace(run([2.0, 0.5, 2.5], method="pb", costs=[(0.2, 0.2), (0.4, 0.4), (0.6, 0.6)]))
STUDY = (run([2.0, 0.5, 0.4]), FALLEN, RISEN)


@cache
def page():
    return render(make_page(STUDY))


def test_the_page_says_how_it_is_interpolated():
    assert "Where a run reaches a cut-off is interpolated" in page()
    assert "costs are interpolated linearly between evaluations" in page()


def test_a_winner_that_failed_later_is_marked():
    found = panel(STUDY, TRAIN_LOSS, 1.0)
    assert [arrival.lost_later for arrival in found.arrivals] == ["", "diverged later", "ended no better than it began"]
    assert lost(found) == "Fastest run failed later: greedy (diverged later), pb (ended no better than it began)"
    assert lost(panel(STUDY[:1], TRAIN_LOSS, 1.0)) == ""
    assert [each["failed_later"] for each in found.to_json()["points"]] == [False, True, True]
    text = page()
    assert '<small class="bad">diverged later</small>' in text.split('<section id="speedup">')[1]
    assert "Fastest run failed later: greedy (diverged later)" in text


def test_ratios_have_their_spread_over_seeds():
    #     seed 0 of greedy is 4 times as fast as backprop's, seed 1 twice; the fastest of all: 8 / 2
    study = [
        run([2.0, 1.0], seed=0, costs=[(4.0, 4.0), (8.0, 8.0)]),
        run([2.0, 1.0], seed=1, costs=[(4.0, 4.0), (8.0, 8.0)]),
        run([2.0, 1.0], method="greedy", seed=0, costs=[(1.0, 4.0), (2.0, 8.0)]),
        run([2.0, 1.0], method="greedy", seed=1, costs=[(2.0, 8.0), (4.0, 16.0)]),
    ]
    _, greedy = speedups(panel(study, TRAIN_LOSS, 1.0), ("backprop", "greedy"))
    assert (greedy.serial, greedy.by_seed, greedy.spread) == (4.0, ((4.0, 1.0), (2.0, 2.0)), "2.0 to 4.0× over 2 seeds")
    assert greedy.total_spread == "1.0 to 2.0×"
    crossed = [
        *study[:2],
        run([2.0, 1.0], method="greedy", seed=0, costs=[(1.0, 4.0), (2.0, 12.0)]),
        run([2.0, 1.0], method="backprop", seed=1, costs=[(2.0, 2.0), (4.0, 6.0)]),
        run([2.0, 1.0], method="greedy", seed=1, costs=[(2.0, 8.0), (3.0, 9.0)]),
    ]
    _, greedy = speedups(panel(crossed, TRAIN_LOSS, 1.0), ("backprop", "greedy"))
    assert (greedy.total, greedy.by_seed) == (2.0, ((4.0, 1.5), (4.0 / 3.0, 1.5)))
    assert greedy.total_spread == "1.5 to 2.0×", "the two fastest runs have two seeds, and their ratio is in the range"
    never = [*study[:3], run([2.0, 1.9], method="greedy", seed=1)]
    _, once = speedups(panel(never, TRAIN_LOSS, 1.0), ("backprop", "greedy"))
    assert (once.spread, once.total_spread) == ("only 1 of 2 seeds gets there with both", "")
    _, single = speedups(panel(study[::2], TRAIN_LOSS, 1.0), ("backprop", "greedy"))
    assert single.spread == "one seed"
    _, apart = speedups(panel([study[0], study[3]], TRAIN_LOSS, 1.0), ("backprop", "greedy"))
    assert apart.spread == "no seed in common"
