"""What inspect shows: each figure where it belongs, and what to do for those that are missing."""

import altair as alt
import pytest

from report.synthetic import run
from stretto.report.inspection import (
    COLUMNS,
    GAP,
    MOST_RECTANGLES,
    SIDE,
    InspectedRun,
    build_inspection,
    cosine_chart,
    loss_chart,
    picture,
    probe_chart,
)
from stretto.report.record import Measurement

FIRST = Measurement(step=5, cosines=(0.25, None, 1.0), local_losses=(2.5, None, 0.75), probes=(0.5, 0.6, None))
LAST = Measurement(
    step=10, cosines=(-0.5, 0.125, 1.0), local_losses=(2.0, None, 0.5), probes=(0.75, 0.875, None),
    filters=("00ff", "80ff"), filter_shape=(1, 1, 2),
)  # fmt: skip


def inspected(*measurements):
    made = run([2.0, 1.0], "greedy", measurements=measurements)
    return InspectedRun(
        record=made, stages=("Linear", "ReLU", "Linear"), heads=("Linear", "", "its output"), delays=(4, 2, 0)
    )


def test_rows():
    assert inspected(FIRST, LAST).rows == [
        ("0", "Linear", "Linear", "4", "2.00", "0.25 → -0.50", "75.0 %"),
        ("1", "ReLU", "–", "2", "–", "– → 0.12", "87.5 %"),
        ("2", "Linear", "its output", "0", "0.500", "1.00 → 1.00", "–"),
    ]
    assert inspected(LAST).rows[0][5] == "-0.50"
    assert [row[3:] for row in inspected().rows] == [("4", "–", "–", "–"), ("2", "–", "–", "–"), ("0", "–", "–", "–")]


def test_what_is_missing_says_how_to_get_it():
    assert inspected(FIRST, LAST).missing == []
    (every,) = inspected().missing
    assert every.startswith("no cosines and no losses of heads, no linear probes, no filters: run it again with ")
    assert "--measure cosine,probes,filters" in every
    (some,) = inspected(Measurement(step=1, probes=(1.0, 1.0, 1.0), filters=("00",), filter_shape=(1, 1, 1))).missing
    assert "--measure cosine (" in some
    (only,) = inspected(FIRST).missing
    assert only.startswith("no filters: run it again with --measure filters")


def test_the_verdict_names_the_stages():
    assert inspected(FIRST, LAST).verdict == (
        "greedy: gradients point least like backpropagation's at stage 0 (cosine -0.50); "
        "a linear probe finds most at stage 1 (87.5 %)."
    )
    assert inspected(Measurement(step=1, cosines=(1.0, None, 1.0))).verdict == (
        "greedy: gradients point as backpropagation's do."
    )
    assert inspected().verdict == "greedy: neither cosines nor probes were measured."


def values(chart):
    spec = chart.to_dict()  # which is checked against Vega-Lite's schema
    alt.Chart.from_dict(spec)
    return spec["datasets"]


def test_charts_hold_the_measurements():
    assert cosine_chart([]) is loss_chart([]) is probe_chart([]) is None
    rows = [row for found in values(cosine_chart([FIRST, LAST])).values() for row in found if "stage" in row]
    assert {(row["step"], row["stage"], row["value"]) for row in rows} == {
        (5, 0, 0.25), (5, 2, 1.0), (10, 0, -0.5), (10, 1, 0.125), (10, 2, 1.0),
    }  # fmt: skip
    rows = [row for found in values(loss_chart([FIRST, LAST])).values() for row in found]
    assert {(row["step"], row["stage"], row["value"]) for row in rows} == {
        (5, 0, 2.5), (5, 2, 0.75), (10, 0, 2.0), (10, 2, 0.5),
    }  # fmt: skip
    rows = [row for found in values(probe_chart([FIRST, LAST])).values() for row in found]
    assert len(rows) == 4


def test_filters_are_drawn_pixel_by_pixel():
    svg = picture(("00ff80", "102030"), (1, 1, 3), "a run")
    assert svg.count("<rect") == 6
    assert svg.count('fill="#808080"') == 1
    assert f'<rect x="{SIDE + GAP:.2f}" y="0.00" width="{SIDE / 3:.2f}" height="{SIDE / 3:.2f}" fill="#101010"/>' in svg
    assert 'fill="#010305"' in picture(("010203040506",), (3, 1, 2), "a run")
    assert 'fill="#020406"' in picture(("010203040506",), (3, 1, 2), "a run")
    many = picture(("00",) * (COLUMNS + 1), (1, 1, 1), "a run")
    assert f'height="{2 * SIDE + GAP}"' in many
    assert picture(("00" * 4000,) * 9, (1, 50, 80), "a run").count("<rect") == 4000 * (MOST_RECTANGLES // 4000)


@pytest.mark.parametrize("measurements", [(), (FIRST, LAST)])
def test_the_page(tmp_path, measurements):
    page = build_inspection(
        tmp_path / "inspect.html", title="Inside <a> model", inspected=[inspected(*measurements)], facts={"Data": "x"}
    )
    text = page.read_text()
    assert "Inside &lt;a&gt; model" in text
    assert text.count('class="chart"') == (3 if measurements else 0)
    assert ("<svg xmlns" in text) == bool(measurements)
    assert ("Not measured: no cosines" in text) != bool(measurements)
    assert "http://" not in text.replace("http://www.w3.org", "").split("<script>")[0]
