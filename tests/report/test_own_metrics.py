"""The user's metrics stand wherever the built-in ones do, with their direction."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from stretto.report import tuning
from stretto.report.charts import ChartSpecs
from stretto.report.html import render
from stretto.report.learning_curves import curve_charts, curve_rows
from stretto.report.metric import METRICS, metrics_of, own_metrics
from stretto.report.palette import styles
from stretto.report.panel import choose, panel, panels
from stretto.report.record import Record
from stretto.report.summary import summarize
from stretto.study.comparison import Outcome

from .synthetic import make_page, run
from .test_terminal import shown

LOSSES = [2.0, 1.0, 0.5]


def own(f1, mae, **values) -> Record:
    """A run with two metrics of the user's, of which f1 is better if higher."""
    made = run(LOSSES, **values)
    points = [replace(point, metrics={"f1": a, "mae": b}) for point, a, b in zip(made.points, f1, mae, strict=True)]
    return replace(
        made, points=tuple(points), higher_is_better=("f1",), metrics={"f1": f1[-1], "mae": mae[-1]},
        test_metrics={"f1": f1[-1] - 0.01234, "mae": mae[-1] + 0.1},
    )  # fmt: skip


RUNS = (
    own([0.1, 0.5, 0.9], [8.0, 4.0, 1.0], method="backprop"),
    own([0.1, 0.3, 0.6], [8.0, 5.0, 3.0], method="greedy"),
)


@cache
def page():
    return render(make_page(RUNS))


def test_they_come_after_the_others_with_their_direction():
    assert metrics_of([run(LOSSES)]) == METRICS
    f1, mae = metrics_of(RUNS)[len(METRICS) :]
    assert (f1.name, f1.higher, mae.name, mae.higher) == ("f1", True, "mae", False)
    assert (f1.final(RUNS[0]), f1.at(RUNS[0].points[1]), f1.at(run(LOSSES).points[0])) == (0.9, 0.5, None)
    assert f1.reaches(0.6, 0.5)
    assert mae.reaches(0.5, 0.6)
    assert not f1.is_share


def test_cutoffs_go_the_way_that_is_better():
    f1, mae = metrics_of(RUNS)[len(METRICS) :]
    rising, falling = choose(RUNS, f1), choose(RUNS, mae)
    assert list(rising) == sorted(set(rising))
    assert rising[-1] == 0.9
    assert list(falling) == sorted(set(falling), reverse=True)
    assert falling[-1] == 1.0
    assert panel(RUNS, f1, 0.5).goal == "f1 ≥ 0.5"
    assert panel(RUNS, f1, 0.8).missing == ("greedy",)
    assert panel(RUNS, mae, 4.0).goal == "mae ≤ 4"


@pytest.mark.parametrize("values", [[-9.0, -5.0, -1.0], [0.0, 0.0, 3.0], [1e-4, 2e-4, 3e-4]])
def test_cutoffs_of_odd_ranges(values):
    record = own(values, values)
    (f1, mae) = metrics_of([record])[len(METRICS) :]
    assert choose([record], f1)[-1] == pytest.approx(values[-1], rel=0.02)
    assert choose([record], mae) == ()


def test_the_json_has_their_frontier():
    content = Outcome(RUNS, (), Path("report.html")).to_json()
    frontier = {(each["metric"], each["higher_is_better"]) for each in content["frontier"]}
    assert {("f1", True), ("mae", False), ("validation_loss", False)} <= frontier
    assert content["runs"][0]["f1"] == 0.9
    json.dumps(content, allow_nan=False)


def test_the_page_and_the_terminal_show_them():
    text = page()
    for part in ("<h3>f1</h3>", "A metric of yours: more is better.", "<h3>mae</h3>", "<th>test f1</th>", "f1 ≥ 0.9",
                 "<td>0.900</td><td>0.888</td>", '<button type="button">val. mae</button>'):  # fmt: skip
        assert part in text, part
    assert re.search(r'id="frontier-f1-0"', text)
    assert "0.888" in shown(RUNS)
    assert "mae" in shown(RUNS)


def test_runs_without_the_metric_are_left_out():
    mixed = (*RUNS, run(LOSSES, method="pb"))
    f1 = metrics_of(mixed)[len(METRICS)]
    assert all("pb" in found.missing for found in panels(mixed, f1))
    assert "</html>" in render(make_page(mixed))


def test_they_have_learning_curves_with_their_direction():
    other = own([0.3, 0.7, 0.7], [8.0, 2.0, 1.0], method="backprop", seed=1)
    summaries = summarize([*RUNS, other])
    charts = curve_charts(summaries, styles(["backprop", "greedy"]))
    assert [name for name in charts if name.startswith("own")] == [
        f"own{index}-{across}" for index in (0, 1) for across in ("step", "examples", "serial")
    ]
    title = charts["own0-step"].to_dict()["layer"][0]["encoding"]["y"]["title"]
    assert title == "f1 (more is better)"
    assert charts["own1-step"].to_dict()["layer"][0]["encoding"]["y"]["title"] == "mae (less is better)"
    means = [
        row for row in curve_rows(summaries, own_metrics(RUNS)) if (row["method"], row["run"]) == ("backprop", "mean")
    ]
    assert [row["own0"] for row in means] == pytest.approx([0.2, 0.6, 0.8])
    assert [row["own1"] for row in means] == pytest.approx([8.0, 3.0, 1.0])


def test_a_metric_that_some_runs_lack_has_no_mean_there():
    summaries = summarize([RUNS[0], run(LOSSES, method="backprop", seed=1)])
    means = [row for row in curve_rows(summaries, own_metrics(RUNS)) if row["run"] == "mean"]
    assert [row["own0"] for row in means] == [None] * 3


def test_they_have_tuning_charts():
    specs = ChartSpecs()
    parts = tuning.section(RUNS, styles(["backprop", "greedy"]), specs)
    assert [part["heading"] for part in parts] == ["Validation loss", "f1 (more is better)", "mae (less is better)"]
    assert [each["method"] for each in parts[1]["charts"]] == ["backprop", "greedy"]
    places = [each["place"] for part in parts for each in part["charts"]]
    assert sorted(specs.to_json()["charts"]) == sorted(places)
    text = page().split('<section id="tuning">')[1].split("</section>")[0]
    assert "<h3>f1 (more is better)</h3>" in text
    plain = render(make_page([run(LOSSES, seed=seed) for seed in (0, 1)]))
    assert "<h3>" not in plain.split('<section id="tuning">')[1].split("</section>")[0]
