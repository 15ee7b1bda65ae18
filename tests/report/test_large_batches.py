"""The section on batch size: which runs it takes, and that figures with known answers come out."""

import json

import pytest

from stretto.analysis.batch_tradeoff import Tradeoff
from stretto.report import large_batches
from stretto.report.charts import ChartSpecs
from stretto.report.html import render
from stretto.report.large_batches import arrivals, by_batch_size, noise_of, sharpness_of, step_time
from stretto.report.palette import styles
from stretto.report.record import Measurement, Record

from .synthetic import make_page, point, run

TRUE = Tradeoff(min_steps=20.0, min_examples=640.0)


def measurement(step, sharpness=2.0, trace=30.0, square=0.5):
    return Measurement(step=step, sharpness=sharpness, noise_trace=trace, gradient_square=square)


def sized(batch, rate=0.1, seed=0, accuracy=0.9, method="backprop", **values):
    """A run that reaches train loss 0.1 after the steps of a known trade-off; a step takes 2 ms + b 10 us."""
    end = round(TRUE.steps(batch))
    points = tuple(
        point(step=step, examples=step * batch, train_loss=loss, validation_accuracy=0.8)
        for step, loss in ((1, 2.0), (end, 0.1))
    )
    defaults = {
        "status": "finished",
        "points": points,
        "train_loss": 0.1,
        "validation_loss": 1.0,
        "validation_accuracy": accuracy,
        "test_accuracy": accuracy - 0.01,
        "seconds_per_step": 2e-3 + batch * 1e-5,
        "measurements": (measurement(end // 4, trace=8.0), measurement(end)),
    }
    options = {"lr": rate, "batch_size": batch}
    return Record(
        id=f"{method}-{rate}-{batch}-{seed}", method=method, seed=seed, options=options, **{**defaults, **values}
    )


def section(records):
    look, specs = styles(tuple(dict.fromkeys(record.method for record in records))), ChartSpecs()
    said = large_batches.section(records, look, specs)
    return said, {name: {**chart, "datasets": specs.datasets} for name, chart in specs.charts.items()}


def rows(chart, key="value"):
    """The values of every inline data set of a chart, layer by layer."""
    return [[row[key] for row in layer if key in row] for layer in datasets(chart)]


def datasets(chart):
    return [layer["data"]["values"] if "values" in layer["data"] else chart["datasets"][layer["data"]["name"]]
            for layer in chart["layer"]]  # fmt: skip


def test_each_batch_has_its_best_rate_and_the_one_of_the_smallest():
    records = [
        sized(8, 0.1, accuracy=0.95),
        sized(8, 0.3, accuracy=0.90),
        sized(64, 0.1, accuracy=0.70),
        sized(64, 0.3, accuracy=0.94),
        sized(64, 0.3, seed=1, accuracy=0.92),
    ]
    small, large = by_batch_size(records)
    assert [run.id for run in small.tuned] == [run.id for run in small.fixed] == ["backprop-0.1-8-0"]
    assert [run.id for run in large.tuned] == ["backprop-0.3-64-0", "backprop-0.3-64-1"]
    assert [run.id for run in large.fixed] == ["backprop-0.1-64-0"]
    assert large.examples_per_second == pytest.approx(64 / (2e-3 + 64e-5))


def test_one_batch_size_has_no_section():
    assert section([sized(8), sized(8, 0.3)]) == (None, {})
    assert section([run([1.0, 0.5], options={})]) == (None, {})


def test_step_times_on_a_line_give_the_line():
    line = step_time(by_batch_size([sized(b) for b in (8, 64, 512)]))
    assert (line.fixed, line.per_example) == (pytest.approx(2e-3), pytest.approx(1e-5))
    assert line.utilisation(200) == pytest.approx(0.5)
    falling = [sized(b, seconds_per_step=1 / b) for b in (8, 64)]
    assert step_time(by_batch_size(falling)) is None
    assert step_time(by_batch_size([sized(8), sized(64, seconds_per_step=None)])) is None


def test_charts_show_known_figures():
    records = [sized(b, accuracy=a) for b, a in ((8, 0.95), (32, 0.95), (160, 0.9))]
    said, charts = section(records)
    assert set(charts) == {f"batch-{name}" for name in ("utilisation", "accuracy", "sharpness", "noise", "tradeoff")}
    assert rows(charts["batch-utilisation"])[1] == pytest.approx([8 / 208, 32 / 232, 160 / 360], rel=1e-4)
    assert rows(charts["batch-accuracy"])[-1] == pytest.approx([0.94, 0.94, 0.89])
    assert rows(charts["batch-sharpness"])[-1] == [2.0] * 3
    assert rows(charts["batch-noise"])[-1] == [16.0] * 3  # a quarter in
    assert rows(charts["batch-noise"])[1] == [60.0] * 3  # at the end
    assert rows(charts["batch-tradeoff"], "steps")[1] == [round(TRUE.steps(b)) for b in (8, 32, 160)]
    assert said["goal"] == "0.1"
    assert said["critical"] == ["backprop: critical batch 32.0, at least 20.0 steps and 640 examples"]


def test_without_a_line_throughput_is_relative_to_the_best():
    said, charts = section([sized(8, seconds_per_step=0.004), sized(64, seconds_per_step=0.001)])
    assert said["relative"]
    assert rows(charts["batch-utilisation"])[1] == pytest.approx([8 / 0.004 / (64 / 0.001), 1.0])


def test_what_nobody_measured_has_no_chart():
    said, charts = section([sized(b, measurements=(), seconds_per_step=None) for b in (8, 64)])
    assert (said["utilisation"], said["sharpness"], said["noise"]) == (None, None, None)
    assert set(charts) == {"batch-accuracy", "batch-tradeoff"}


def test_noise_is_averaged_before_it_is_divided():
    runs = [sized(8, seed=s, measurements=(measurement(9, trace=t, square=g),)) for s, t, g in
            ((0, 10.0, -0.5), (1, 30.0, 1.5))]  # fmt: skip
    assert noise_of(runs, 1) == 40.0
    assert noise_of(runs[:1], 1) is None
    assert sharpness_of(runs) == [2.0, 2.0]
    assert noise_of([sized(8, measurements=())], 1) is None
    diverged = sized(8, status="diverged", diverged_at=9)
    assert (noise_of([diverged], 1), sharpness_of([diverged])) == (None, [])


def test_arrivals_are_the_fewest_steps_of_any_rate():
    slow = sized(8, 0.3, points=(point(step=1, train_loss=2.0), point(step=500, examples=4000, train_loss=0.1)))
    goal, found = arrivals([sized(8), slow, sized(64)])
    assert goal == 0.1
    assert found == {"backprop": {8: (100.0, 800.0), 64: (30.0, 1920.0)}}
    assert arrivals([sized(8)]) is None


def test_the_page_has_the_section():
    records = tuple(sized(b, method=m) for m in ("backprop", "greedy") for b in (8, 32, 200))
    text = render(make_page(records))
    assert '<section id="batches">' in text
    assert "Steps against examples to train loss 0.1" in text
    assert json.dumps(records[0].to_json(), allow_nan=False)
    assert '<section id="batches">' not in render(make_page(records[:1]))


def test_measurements_survive_json():
    record = sized(8)
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_no_curve_goes_through_as_many_points_as_it_has_parameters():
    two = [sized(8), sized(64)]
    assert step_time(by_batch_size(two)) is None
    assert step_time(by_batch_size([*two, sized(512)])) is not None
    said, charts = section(two)
    assert said["critical"] == ["backprop: 2 batch sizes got there, too few for a curve with 2 parameters"]
    assert not said["curved"]
    assert said["relative"]
    assert rows(charts["batch-tradeoff"], "steps")[0] == []
    text = render(make_page(tuple(two)))
    assert "fitted to them" not in text
    assert "by the fit" not in text
