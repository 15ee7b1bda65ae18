"""The table of a method's measures: time to its best, options to tune, stability."""

from stretto.report.html import render
from stretto.report.measures import best_point, section
from stretto.report.metric import VALIDATION_LOSS
from stretto.report.summary import summarize
from stretto.study.study import options_of

from .synthetic import make_page, run

COSTS = [(1e9, 1e10), (2e9, 2e10), (3e9, 3e10)]
RUNS = (
    run([2.0, 0.5, 0.8], seed=0, costs=COSTS, test_loss=0.9, options={"lr": 0.1, "batch_size": 8}),
    run([2.0, 0.9, 0.6], seed=1, costs=COSTS, test_loss=0.7, options={"lr": 0.1, "batch_size": 8}),
    run([2.0, 2.1, 2.2], method="greedy", costs=COSTS),
)


def test_the_cost_is_that_of_the_best_evaluation():
    assert best_point(RUNS[0], VALIDATION_LOSS).step == 2
    row, _ = section(summarize(RUNS), {})["rows"]
    assert (row["best"], row["test"], row["serial"], row["step"]) == ("0.600", "0.700", "3.00 GFLOP", "step 3 of 3")
    assert row["range"] == "2.00 to 3.00 GFLOP over 2 seeds"
    assert row["spread"] == "0.141"
    assert row["failed"] == "0 of 2"


def test_options_are_those_of_the_run_and_of_the_method():
    row, _ = section(summarize(RUNS), {"backprop": ("head", "delay")})["rows"]
    assert (row["options"], row["names"]) == ("4", "lr, batch_size, head, delay")
    (bare,) = section(summarize([run([2.0, 1.0], options={"batch_size": 8})]), {"backprop": ()})["rows"]
    assert (bare["options"], bare["names"]) == ("1", "batch_size")
    (unknown,) = section(summarize([run([2.0, 1.0])]), {})["rows"]
    assert unknown["options"] == "1 or more"


def test_the_table_of_methods_says_which_options_there_are():
    assert options_of("backprop") == ()
    assert "chunks" in options_of("chunked(chunks=3)")
    assert "stash" in options_of("pb(stash=True)")


def test_a_method_that_only_failed_has_no_time():
    _, row = section(summarize(RUNS), {})["rows"]
    assert (row["best"], row["serial"], row["range"], row["spread"], row["failed"]) == ("–", "–", "", "n/a", "1 of 1")


def test_the_page_has_the_table():
    text = render(make_page(RUNS, own_options={"backprop": (), "greedy": ("head",)}))
    part = text.split('<section id="measures">')[1].split("</section>")[0]
    for said in ("options to tune", "spread over seeds", "3.00 GFLOP", "lr, batch_size"):
        assert said in part, said
    assert "by the clock" not in part
    assert "by the clock" in render(make_page(RUNS, processes=2)).split('<section id="measures">')[1]
    assert '<section id="measures">' not in render(make_page(()))
