"""Time by the clock to each cut-off, for runs whose workers were processes."""

import re
from dataclasses import replace

import pytest

from stretto.report.clock import clock_chart, clock_times
from stretto.report.html import render
from stretto.report.metric import TRAIN_LOSS
from stretto.report.palette import styles
from stretto.report.panel import panel

from .synthetic import make_page, run
from .test_charts import rows_of


def timed(seconds, losses, **values):
    made = run(losses, **values)
    points = [replace(point, seconds=float(at)) for point, at in zip(made.points, seconds, strict=True)]
    return replace(made, points=tuple(points))


RUNS = (
    timed([10, 20, 30], [1.0, 0.5, 0.2], method="backprop", seed=0),
    timed([9, 18, 27], [1.1, 0.6, 0.3], method="backprop", seed=1),
    timed([4, 8, 12], [1.0, 0.5, 0.4], method="greedy"),
)


def test_the_soonest_run_of_each_method_counts():
    times = clock_times(panel(RUNS, TRAIN_LOSS, 0.6), ("backprop", "greedy"))
    assert [(entry.arrival.at.seconds, entry.times) for entry in times] == [
        (18, 1),
        (pytest.approx(7.2), pytest.approx(2.5)),
    ]


def test_who_never_gets_there_has_no_time():
    times = clock_times(panel(RUNS, TRAIN_LOSS, 0.3), ("backprop", "greedy"))
    assert times[1].arrival is None
    assert times[1].times is None
    assert times[0].arrival.at.seconds == pytest.approx(80 / 3)


def test_without_backprop_there_is_no_ratio():
    (entry,) = clock_times(panel(RUNS[2:], TRAIN_LOSS, 0.6), ("greedy",))
    assert entry.arrival.at.seconds == pytest.approx(7.2)
    assert entry.times is None


def test_the_chart_holds_who_arrives():
    by_goal = {f"{goal}": clock_times(panel(RUNS, TRAIN_LOSS, goal), ("backprop", "greedy")) for goal in (0.6, 0.3)}
    rows = rows_of(clock_chart(by_goal, styles(["backprop", "greedy"])))
    assert [(row["method"], row["goal"], row["seconds"]) for row in rows] == [
        ("backprop", "0.6", 18), ("greedy", "0.6", 7.2), ("backprop", "0.3", 26.667)]  # fmt: skip


def test_the_page_shows_it_for_processes_only():
    with_processes = render(make_page(RUNS, processes=2))
    section = re.search(r'<section id="clock">.*?</section>', with_processes, re.S)
    assert section is not None
    for text in ("the 2 processes of a run", "2.5× as soon", "7.20 s", "not reached", 'id="clock-train_loss"'):
        assert text in section[0], text
    emulated = render(make_page(RUNS))
    assert 'id="clock"' not in emulated
    assert "of an emulation" in emulated


@pytest.mark.parametrize("seconds", [[0, 20, 30], [0, 0, 0]])
def test_no_time_at_all_is_no_ratio(seconds):
    (entry,) = clock_times(panel((timed(seconds, [0.1, 0.1, 0.1]),), TRAIN_LOSS, 0.6), ("backprop",))
    assert entry.arrival.at.seconds == 0
    assert entry.times is None


def test_ratios_have_their_range_over_seeds():
    records = (*RUNS, timed([6, 12, 18], [1.0, 0.6, 0.4], method="greedy", seed=1))
    names = ("backprop", "greedy")
    plain, greedy = clock_times(panel(records, TRAIN_LOSS, 0.6), names)
    assert greedy.by_seed == (pytest.approx(18 / 7.2), pytest.approx(18 / 12))
    assert greedy.spread == "1.5 to 2.5× over 2 seeds"
    assert plain.by_seed == (1, 1)
    text = re.search(r'<section id="clock">.*?</section>', render(make_page(records, processes=2)), re.S)[0]
    assert "1.5 to 2.5× over 2 seeds" in text
    assert "1.0× over 2 seeds" not in text  # nothing is told of backprop against itself
    (alone,) = clock_times(panel(records[2:3], TRAIN_LOSS, 0.6), ("greedy",))
    assert alone.spread == ""


def test_a_seed_that_does_not_get_there_is_told():
    records = (*RUNS, timed([6, 12, 18], [1.0, 0.9, 0.8], method="greedy", seed=1))
    assert clock_times(panel(records, TRAIN_LOSS, 0.6), ("backprop", "greedy"))[1].spread == (
        "only 1 of 2 seeds gets there with both"
    )
