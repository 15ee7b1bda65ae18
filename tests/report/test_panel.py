import json

import pytest

from stretto.report.metric import TRAIN_LOSS
from stretto.report.panel import first_reaching, panel, panels
from stretto.report.speedup import baseline, speedups

from .synthetic import run

STUDY = (
    run([2.0, 0.5], id="b-fast", costs=[(3.0, 30.0), (6.0, 60.0)]),
    run([2.0, 0.5], id="b-cheap", costs=[(4.0, 20.0), (8.0, 40.0)]),
    run([2.0, 0.5], id="b-poor", costs=[(5.0, 50.0), (9.0, 90.0)]),
    run([0.9, 0.8], id="g", method="greedy", costs=[(1.0, 45.0), (2.0, 90.0)]),
    run([2.0, 1.9], id="p", method="pb", costs=[(1.0, 1.0), (2.0, 2.0)]),
)
NAMES = ("backprop", "greedy", "pb")


def test_arrivals_flags_and_missing():
    found = panel(STUDY, TRAIN_LOSS, 1.0)
    assert {a.record.id: a.dominated for a in found.arrivals} == {
        "b-fast": False,
        "b-cheap": False,
        "b-poor": True,
        "g": False,
    }
    assert found.missing == ("pb",)
    assert found.fastest("backprop").record.id == "b-fast"
    assert found.fastest("pb") is None


def test_json_holds_the_frontier_only():
    data = json.loads(json.dumps(panel(STUDY, TRAIN_LOSS, 1.0).to_json(), allow_nan=False))
    assert [each["run"] for each in data["points"]] == ["b-fast", "b-cheap", "g"]
    assert data["points"][2]["serial_flops"] == 1.0
    assert data["missing"] == ["pb"]
    assert data["metric"] == "train_loss"


def test_speedups_are_against_the_fastest_backprop():
    reference, greedy, pb = speedups(panel(STUDY, TRAIN_LOSS, 1.0), NAMES)
    assert (reference.serial, reference.total) == (1.0, 1.0)
    assert (greedy.serial, greedy.total) == (pytest.approx(5.0), pytest.approx(0.9))  # backprop crosses at (5, 50)
    assert (pb.arrival, pb.serial, pb.total) == (None, None, None)


def test_speedups_without_backprop_or_where_it_fails():
    assert baseline(("greedy", "pb")) is None
    assert baseline(("greedy", "backprop")) == "backprop"
    only = panel(STUDY[3:], TRAIN_LOSS, 1.0)
    greedy = speedups(only, ("greedy", "pb"))[0]
    assert greedy.arrival is not None
    assert greedy.serial is None


def test_panels_agree_with_first_reaching(records):
    for found in panels(records, TRAIN_LOSS):
        assert {arrival.record.id for arrival in found.arrivals} == {
            record.id for record in records if first_reaching(record, TRAIN_LOSS, found.cutoff)
        }
