"""The charts are data: what they show is read back from their JSON."""

import json
import math

import pytest

from stretto.report.frontier import frontier_chart
from stretto.report.learning_curves import curve_charts, curve_rows
from stretto.report.metric import TRAIN_LOSS, VALIDATION_ACCURACY, VALIDATION_LOSS
from stretto.report.palette import styles
from stretto.report.panel import panel, panels
from stretto.report.record import methods
from stretto.report.summary import summarize
from stretto.report.tuning import tuning_charts, tuning_rows

from .synthetic import make_records, run


def rows_of(chart) -> list[dict]:
    """All data of a chart; to_dict checks it against Vega-Lite's schema, dumps refuses NaN."""
    spec = chart.to_dict()
    json.dumps(spec, allow_nan=False)
    return [row for rows in spec["datasets"].values() for row in rows]


def test_frontier_chart_holds_every_arrival_and_its_flag(records):
    look = styles(methods(records))
    for found in panels(records, TRAIN_LOSS):
        rows = rows_of(frontier_chart(found, look))
        assert {row["run"]: row["frontier"] for row in rows} == {
            arrival.record.id: not arrival.dominated for arrival in found.arrivals
        }
        assert len({id(row) for row in rows}) == len(found.arrivals)


def test_frontier_chart_has_the_costs_in_the_unit_of_its_axis():
    fast = run([2.0, 0.5], id="fast", costs=[(1e9, 1e12), (2e9, 3e12)])
    chart = frontier_chart(panel([fast], TRAIN_LOSS, 1.0), styles(["backprop"]))
    (row,) = rows_of(chart)
    assert (row["x"], row["y"]) == (1.6667, 2.3333)  # two thirds of the way between the evaluations
    text = json.dumps(chart.to_dict())
    assert "serial compute, GFLOP" in text
    assert "total compute, TFLOP" in text
    assert (row["options"], row["seed"], row["step"], row["state"]) == ("lr=0.1", 0, "1.67", "finished")
    assert row["serial_text"] == "1.67 GFLOP"


def test_frontier_chart_of_nobody_is_none():
    assert frontier_chart(panel([run([2.0])], TRAIN_LOSS, 1.0), styles(["backprop"])) is None
    free = run([0.5], costs=[(0.0, 0.0)])
    assert frontier_chart(panel([free], TRAIN_LOSS, 1.0), styles(["backprop"])) is None


def test_colors_in_charts_are_the_palette(records):
    look = styles(methods(records))
    spec = frontier_chart(panels(records, TRAIN_LOSS)[0], look).to_dict()
    scales = [layer["encoding"]["color"]["scale"] for layer in spec["layer"]]
    assert all(scale["range"] == [style.color for style in look.values()] for scale in scales)
    assert all(scale["domain"] == list(look) for scale in scales)


def test_curves_show_all_seeds_of_the_best_configuration_and_their_mean(records):
    summaries = summarize(records)
    rows = curve_rows(summaries)
    for summary in summaries:
        own = [row for row in rows if row["method"] == summary.method]
        assert {row["run"] for row in own} == {"mean"} | {record.id for record in summary.best_configuration}
    first = [row for row in rows if row["method"] == "backprop" and row["step"] == 100]
    seeds = [row["train"] for row in first if row["run"] != "mean"]
    (mean,) = [row["train"] for row in first if row["run"] == "mean"]
    assert abs(mean - sum(seeds) / len(seeds)) < 1e-12


def test_curves_have_six_charts_with_one_set_of_data(records):
    charts = curve_charts(summarize(records), styles(methods(records)))
    assert len(charts) == 6
    axis = charts["train-serial"].to_dict()["layer"][0]["encoding"]["x"]["axis"]
    assert axis["labelExpr"] == "format(datum.value, datum.value < 1 ? '~g' : '~s')"  # 0.4 GFLOP, not 400m
    assert len({name for chart in charts.values() for name in chart.to_dict()["datasets"]}) == 1


def test_long_curves_are_thinned_and_zero_losses_left_out():
    long = run([1 / step for step in range(1, 1000)] + [0.0])
    rows = curve_rows(summarize([long]))
    own = [row for row in rows if row["run"] != "mean"]
    assert len(own) == 80
    assert (own[0]["step"], own[-1]["step"]) == (1, 1000)
    assert own[-1]["train"] is None
    assert curve_charts(summarize([run([1.0], status="diverged")]), {}) == {}


def test_negative_losses_get_a_linear_axis():
    charts = curve_charts(summarize([run([1.0, -1.0])]), styles(["backprop"]))
    scale = charts["train-step"].to_dict()["layer"][0]["encoding"]["y"]["scale"]
    assert scale.get("type") != "log"


def test_tuning_shows_every_run_and_crosses_for_the_diverged(records):
    rows = tuning_rows(records, VALIDATION_LOSS)
    assert len(rows) == len(records)
    assert {row["run"] for row in rows if row["value"] is None} == {r.id for r in records if r.diverged}
    charts = tuning_charts(records, styles(methods(records)))
    assert list(charts) == list(methods(records))
    for method, chart in charts.items():
        shown = {row["run"] for row in rows_of(chart) if "run" in row}
        assert shown == {record.id for record in records if record.method == method}
        assert '"text": "diverged"' in json.dumps(chart.to_dict())


@pytest.mark.parametrize("metric", [VALIDATION_LOSS, VALIDATION_ACCURACY])
def test_tuning_leaves_a_fifth_of_the_axis_to_failed_runs(records, metric):
    """Above the largest value, on a logarithmic axis and on a linear one."""
    largest = max(row["value"] for row in tuning_rows(records, metric) if row["value"] is not None)
    for chart in tuning_charts(records, styles(methods(records)), metric).values():
        scale = chart.to_dict()["layer"][0]["encoding"]["y"]["scale"]
        place = math.log if scale.get("type") == "log" else float
        bottom, top = map(place, scale["domain"])
        assert (top - place(largest)) / (top - bottom) == pytest.approx(0.2, abs=0.04)


def test_tuning_needs_a_learning_rate():
    assert tuning_charts([run([1.0], options={})], styles(["backprop"])) == {}
    assert tuning_charts([run([1.0], options={"lr": "auto"})], styles(["backprop"])) == {}


def test_tuning_when_all_diverged_or_there_is_no_batch_size():
    all_diverged = [run([1.0], status="diverged", options={"lr": 0.1, "batch_size": 8})]
    assert list(tuning_charts(all_diverged, styles(["backprop"]))) == ["backprop"]
    (chart,) = tuning_charts(make_records(("pb",), batches=(8,), accuracy=False), styles(["pb"])).values()
    assert rows_of(chart)
    (chart,) = tuning_charts([run([1.0])], styles(["backprop"])).values()
    assert {row["batch"] for row in rows_of(chart) if "run" in row} == {0}
