"""The section on delay: averages, charts that hold them, words for what charts leave out."""

import json
import re

from stretto.report import cures as charts
from stretto.report.cures import grouped, memory_chart, memory_rows, observed_methods, of_all_stages, of_fullest_stage
from stretto.report.html import render
from stretto.report.palette import styles
from stretto.report.summary import summarize

from .synthetic import make_page, observation, run
from .test_charts import rows_of

DELAYS = {"backprop": (0, 0, 0), "pb": (4, 2, 0), "pb-lwp": (4, 2, 0), "pipedream": (2, 1, 0)}
PREDICTING = {"prediction_error": (0.1, 0.03, None), "unpredicted_error": (0.2, 0.01, None)}


def study():
    """pb with two seeds, pb-lwp that predicts, pipedream that matches, backprop that was not observed."""
    return (
        run([2.0, 1.0], method="backprop"),
        run([2.0, 1.5], method="pb", seed=0, observations=(observation(10), observation(20, (0.4, 0.2, 0.0)))),
        run([2.0, 1.5], method="pb", seed=1, observations=(observation(10), observation(20, (0.6, 0.4, 0.0)))),
        run([2.0, 1.4], method="pb-lwp", observations=(observation(10, **PREDICTING), observation(20, **PREDICTING))),
        run([2.0, 1.3], method="pipedream",
            observations=(observation(10, (0.0, 0.0, 0.0), weight_bytes=(3000, 2000, 1000)),)),
    )  # fmt: skip


def seen():
    return observed_methods(summarize(study()), study())


def test_averages_over_seeds_and_the_most_of_memory():
    pb, lwp, pipedream = seen()
    assert [each.method for each in (pb, lwp, pipedream)] == ["pb", "pb-lwp", "pipedream"]
    assert pb.mismatch == (0.5, 0.30000000000000004, 0.0)
    assert [step for step, _ in pb.over_steps] == [10, 20]
    assert abs(pb.over_steps[1][1] - 0.8 / 3) < 1e-12
    assert not pb.matches
    assert not pb.predicts
    assert lwp.predicts
    assert lwp.gain == (0.5, 3.0, None)
    assert pipedream.matches
    assert pipedream.fullest == 0
    assert pipedream.stage_bytes == (3300, 2200, 1100)


def test_a_method_whose_runs_all_diverged_is_shown_as_far_as_it_came():
    lost = run([2.0], method="pb", status="diverged", diverged_at=30, observations=(observation(),))
    (only,) = observed_methods(summarize((lost,)), (lost,))
    assert only.mismatch == (0.2, 0.1, 0.0)


def test_ticks_are_whole_updates():
    chart = charts.delay_chart({(1, 0): ["pb"]}, styles(["pb"]))
    assert chart.to_dict()["layer"][0]["encoding"]["y"]["axis"]["values"] == [0, 1]


def test_methods_with_the_same_delays_share_a_line():
    groups = grouped(DELAYS)
    assert groups == {(4, 2, 0): ["pb", "pb-lwp"], (2, 1, 0): ["pipedream"], (0, 0, 0): ["backprop"]}
    rows = rows_of(charts.delay_chart(groups, styles(list(DELAYS))))
    assert [row["value"] for row in rows if row["method"] == "pb"] == [4, 2, 0]
    assert {row["methods"] for row in rows} == {"pb, pb-lwp", "pipedream", "backprop"}


def test_charts_hold_what_a_logarithmic_axis_can_show():
    look = styles(list(DELAYS))
    over_steps = rows_of(charts.mismatch_chart(seen(), look))
    assert {(row["method"], row["step"]) for row in over_steps} == {(m, s) for m in ("pb", "pb-lwp") for s in (10, 20)}
    by_stage = rows_of(charts.mismatch_by_stage_chart(seen(), look))
    assert {(row["method"], row["stage"]) for row in by_stage} == {(m, s) for m in ("pb", "pb-lwp") for s in (0, 1)}
    errors = rows_of(charts.prediction_chart(seen(), look))
    assert [row["value"] for row in errors if row["what"] == "predicted"] == [0.1, 0.03]
    assert [row["value"] for row in errors if row["what"] == "current"] == [0.2, 0.01]
    gains = rows_of(charts.gain_chart(seen(), look))
    assert [row["value"] for row in gains] == [1, 0.5, 3.0]  # the line at 1, then the method
    once = [each for each in seen() if each.method == "pipedream"]
    for chart in (charts.mismatch_chart, charts.mismatch_by_stage_chart, charts.prediction_chart, charts.gain_chart):
        assert chart(once, look) is None


def test_memory_is_stacked():
    pipedream = seen()[2]
    assert [row["bytes"] for row in memory_rows(pipedream, of_fullest_stage)] == [3000, 300]
    assert [row["bytes"] for row in memory_rows(pipedream, of_all_stages)] == [6000, 600]
    chart = memory_chart(seen(), "all stages", of_all_stages)
    assert "all stages, KiB" in json.dumps(chart.to_dict())
    assert {row["method"]: row["value"] for row in rows_of(chart) if row["kind"] == "weights"}["pipedream"] == 5.8594


def test_the_section_and_its_words():
    text = render(make_page(study(), delays=DELAYS, left_out={"nesterov": "wants <NAdam>"}))
    section = text.split('<section id="cures">')[1].split("</section>")[0]
    assert len(re.findall('class="chart"', section)) == 7
    assert "Exactly 0 on every stage: pipedream." in section
    assert "4 2 0" in section
    assert "2.93 KiB" in section
    assert "<b>nesterov</b>: wants &lt;NAdam&gt;" in text


def test_no_section_without_a_delay_and_half_a_one_without_observations():
    assert '<section id="cures">' not in render(make_page(study(), delays={"backprop": (0, 0)}))
    assert "Left out" not in render(make_page(study()))
    bare = tuple(run([2.0, 1.0], method=method) for method in DELAYS)
    section = render(make_page(bare, delays=DELAYS)).split('<section id="cures">')[1].split("</section>")[0]
    assert len(re.findall('class="chart"', section)) == 1
    assert "Memory" not in section
