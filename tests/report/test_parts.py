"""Units, colors, settings, pictures, ticks: the small pure parts."""

import tomllib

import pytest

from stretto.errors import UsageError
from stretto.report import units
from stretto.report.charts import checked
from stretto.report.metric import TRAIN_LOSS, metric
from stretto.report.page import as_toml
from stretto.report.palette import NEUTRAL, styles

from .synthetic import PICTURE


def test_units():
    assert units.flops(1.234e12) == "1.23 TFLOP"
    assert units.flops(0) == "0.00 FLOP"
    for value, text in {-0.047482: "-47.5 ms", -2.5: "-2.50 s", -3e-6: "-3.00 µs", 0: "0.00 µs"}.items():
        assert units.duration(value) == text  # a plan's correction is below 0 where steps took less than predicted
    assert units.flops(None) == "–"
    assert units.number(0.000803) == "0.000803"
    assert units.number(1.5e-9) == "1.50e-09"
    assert units.number(1437.0) == "1437"
    assert units.percent(0.9725) == "97.2 %"
    assert units.cutoff(0.9725, True) == "97.25 %"
    assert units.cutoff(0.05, False) == "0.05"
    assert units.times(3.14) == "3.1×"
    assert units.times(0.25) == "0.25×"
    assert [units.bytes_held(b) for b in (100, 3 * 2**20)] == ["100 B", "3.00 MiB"]
    assert [units.seconds(s) for s in (3, 600, 7200)] == ["3.00 s", "10.0 min", "2.0 h"]


def test_metric_by_name():
    assert metric("train_loss") is TRAIN_LOSS
    with pytest.raises(UsageError, match="did you mean 'train_loss'"):
        metric("trainloss")


def test_a_method_has_the_same_color_in_every_report():
    assert styles(["backprop", "greedy", "pb"])["greedy"] == styles(["greedy"])["greedy"]
    assert styles(["greedy", "backprop"])["backprop"].color == NEUTRAL


@pytest.mark.parametrize("more", [(), ("1f1b", "greedy"), ("chunked(chunks=2)", "gpipe", "1f1b")])
def test_a_method_without_a_color_of_its_own_keeps_its_look_where_it_is_free(more):
    look = styles(["backprop", "pipedream-2bw"])["pipedream-2bw"]
    for methods in ([*more, "pipedream-2bw"], ["pipedream-2bw", *more, "backprop"]):
        assert styles(methods)["pipedream-2bw"] == look


def test_a_variant_makes_way_for_the_method_whose_color_it_would_take():
    assert styles(["chunked(chunks=2)", "chunked(chunks=3)", "pb"])["pb"] == styles(["pb"])["pb"]


def test_marks_of_a_study_differ_by_more_than_color():
    names = ["backprop", "1f1b", "greedy", "overlapping", "chunked", "pipedream-2bw", "pipedream", "zb-h1", "paci"]
    assert len({style.shape for style in styles(names).values()}) == len({s.path for s in styles(names).values()}) == 9


def test_methods_of_one_family_and_many_methods_differ():
    names = [f"chunked(chunks={n})" for n in range(2, 5)] + [f"m{n}" for n in range(20)] + ["backprop", "backprop(x=1)"]
    found = styles(names)
    assert list(found) == names
    assert len({(style.color, style.shape) for style in found.values()}) == len(names)  # points
    assert len({(style.color, style.dash) for style in found.values()}) == len(names)  # lines
    assert len({style.color for name, style in found.items() if name.startswith("chunked")}) == 3


def test_settings_read_back_as_toml():
    settings = {
        "steps": 10, "rates": [0.1, 1e-5], "quiet": False, "note": 'say "hi" – ümlaut',
        "model": {"name": "mlp", "width": 256, "odd key": 1, "deep": {"er": "yes"}}, "mixed": [{"a": 1}],
    }  # fmt: skip
    assert tomllib.loads(as_toml(settings)) == settings
    assert as_toml({"clip": None}) == "# clip is not set"
    assert as_toml({}) == ""


def test_pictures_are_checked():
    assert checked('<?xml version="1.0"?>' + PICTURE, "pb") == PICTURE
    for bad in (
        "<svg><script>alert(1)</script></svg>",
        '<svg onload="alert(1)"/>',
        '<svg xmlns:x="http://www.w3.org/1999/xlink"><rect x:href="http://example.com"/></svg>',
        '<svg><rect fill="url(http://example.com)"/></svg>',
        "<svg><style>@import 'x'</style></svg>",
        "<svg>",
        "nothing",
    ):
        with pytest.raises(UsageError, match="schedule picture of 'pb'"):
            checked(bad, "pb")


def test_ticks_are_few_round_and_inside():
    from stretto.report.charts import linear_ticks, log_domain, log_ticks

    assert log_ticks(0.9, 1100) == [1, 3, 10, 30, 100, 300, 1000]
    assert log_ticks(4.1, 5.6) == [4.5, 5.0, 5.5]
    assert log_ticks(1.001, 1.011) == []
    assert 1 < len(log_ticks(1e-20, 1e20)) <= 7
    assert linear_ticks(0.87, 0.98) == [0.88, 0.9, 0.92, 0.94, 0.96, 0.98]
    low, high = log_domain([5.0])
    assert low < 5 < high
