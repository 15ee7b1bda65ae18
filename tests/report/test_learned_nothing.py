"""A run that ends no better than it began has failed, whatever its status says."""

from dataclasses import replace

import pytest

from stretto.report.html import render
from stretto.report.metric import VALIDATION_LOSS
from stretto.report.panel import panel
from stretto.report.record import Record
from stretto.report.summary import summarize
from stretto.report.tuning import tuning_rows
from stretto.report.verdict import verdict

from .synthetic import make_page, run
from .test_terminal import shown

STUCK = run([2.3, 2.31, 2.3], method="greedy", seed=1)
FINE = run([2.3, 1.0, 0.9], method="greedy", seed=0)
PLAIN = run([2.3, 1.5, 1.0])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([2.3, 2.3], True), ([2.3, 1.0, 2.4], True), ([2.3, 2.299], False), ([2.3], False), ([], False)],
)
def test_no_better_at_the_end_than_at_the_first_evaluation(losses, expected):
    assert run(losses).learned_nothing is expected
    assert run(losses).failed is expected


def test_a_diverged_run_is_diverged():
    record = run([2.3, 2.4], status="diverged", diverged_at=3)
    assert (record.learned_nothing, record.failed, record.outcome) == (False, True, "diverged at step 3")
    assert (STUCK.outcome, FINE.outcome) == ("learned nothing", "finished")


def with_accuracy(first: float, last: float) -> Record:
    record = run([2.3, 2.9])
    points = [replace(point, validation_accuracy=a) for point, a in zip(record.points, (first, last), strict=True)]
    return replace(record, points=tuple(points), validation_accuracy=last)


def test_a_classifier_that_is_too_sure_of_right_answers_has_learned():
    assert not with_accuracy(0.1, 0.8).learned_nothing
    assert with_accuracy(0.1, 0.15).learned_nothing  # always the same class, another one than at first
    assert with_accuracy(0.1, 0.05).learned_nothing


def test_it_is_no_best_run_and_is_counted():
    stuck_better = replace(STUCK, test_loss=0.1)
    plain, greedy = summarize([PLAIN, stuck_better, FINE])
    assert (greedy.chosen, greedy.diverged, greedy.learned_nothing, greedy.failed) == (FINE, 0, 1, 1)
    assert greedy.near_best == 0, "a configuration with a failed seed never is"
    assert plain.learned_nothing == 0
    (alone,) = summarize([STUCK])
    assert (alone.chosen, alone.best_validation_loss) == (None, None)
    assert VALIDATION_LOSS.final(STUCK) is None


def test_the_page_counts_and_lists_it():
    text = render(make_page((PLAIN, STUCK, FINE)))
    assert "3; none diverged, 1 learned nothing" in text
    assert "<td>1<small>of 2</small></td>" in text.split('<section id="methods">')[1]
    listed = text.split('<section id="failed">')[1].split("</section>")[0]
    assert "learned nothing</td>" in listed
    assert listed.count("<tr><td>") == 1
    assert '<td data-key="learned nothing">learned nothing</td>' in text
    assert '"text":"failed"' in text, "the row of crosses in the tuning charts"


def test_tuning_and_terminal_show_it_beside_the_diverged():
    assert {row["run"] for row in tuning_rows([PLAIN, STUCK], VALIDATION_LOSS) if row["value"] is None} == {STUCK.id}
    text = shown([PLAIN, STUCK, run([2.3], method="pb", status="diverged", diverged_at=2)])
    assert "Failed: 1 diverged, 1 learned nothing." in text
    assert text.count("1/1") == 2
    assert "ailed" not in shown([PLAIN])


def test_the_verdict_of_such_runs_only():
    assert verdict([STUCK]).startswith("The only run learned nothing")
    diverged = run([2.3], status="diverged", diverged_at=2)
    assert verdict([STUCK, diverged]).startswith("All 2 runs failed: 1 diverged, 1 learned nothing.")


def test_what_it_reached_on_its_way_counts_and_is_marked():
    (arrival,) = panel([run([2.3, 1.0, 2.4])], VALIDATION_LOSS, 1.0).arrivals
    assert arrival.lost_later == "ended no better than it began"
