"""Predicted against measured: what is known of a made-up run comes out, and errors have the right sign."""

import json

import pytest

import stretto
from pairwise import slow_where
from stretto.report.html import render
from stretto.report.prediction import MEAN_TIMES, RunPrediction, compare_with_prediction, predicted_chart
from stretto.report.turns import mean_durations
from stretto.schedule import Action
from stretto.simulate import Link, Network, period, simulate
from stretto.simulate.timeline import recordings
from stretto.tracing import Recording

from .synthetic import make_page, recorded
from .test_charts import rows_of

COST = {"F": 1_000_000, "B": 2_000_000, "I": 1_000_000, "W": 1_000_000, "U": 100_000}
LATENCY = 3_000_000


def cost(action):
    return COST[action.kind] * (1 + action.stage)


def run(name, latency=0, turns=40):
    """Recordings of processes whose every time is known, with what their workers counted."""
    schedule, rules = stretto.method(name).plan(4, None)
    timeline = simulate(schedule, rules, turns, cost, latency=latency)
    found = recordings(timeline, rules, unit=1)
    for recording in found:
        recording.process = recording.worker
        recording.count(f"forwards held by stage {recording.worker}", 0, timeline.peak_graphs[recording.worker])
    return found, schedule, rules


def compare(method, recordings, schedule, rules, prediction, **values):
    return compare_with_prediction(recorded("r", method, recordings, schedule, rules), prediction, **values)


def row(each, name):
    return next(row for row in each.rows if row.name == name)


@pytest.mark.parametrize("name", slow_where("1f1b".__eq__, ["1f1b", "pb", "zb-h1"]))
def test_what_was_predicted_with_the_right_times_is_what_was_measured(name):
    found, schedule, rules = run(name, LATENCY)
    network = Network(Link(LATENCY))
    each = compare(name, found, schedule, rules, RunPrediction(source="x", durations=cost, network=network))
    assert each.seconds == pytest.approx(period(schedule, rules, cost, latency=LATENCY) / 1e9)
    assert all(seconds == pytest.approx(each.seconds) for seconds in each.steps.values())
    assert max(map(abs, each.errors)) < 1e-9
    for compared in each.rows:
        assert compared.measured == pytest.approx(compared.predicted, abs=1e-12)
    alone = period(schedule, rules, cost) / 1e9
    assert row(each, "of it communication").measured == pytest.approx(each.seconds - alone)
    assert row(each, "worker 3 computes").measured == pytest.approx(
        sum(cost(action) for action in schedule.body[3]) / 1e9
    )


def test_where_steps_take_turns_being_long_the_prediction_is_their_mean():
    found, schedule, rules = run("pipedream", LATENCY)
    network = Network(Link(LATENCY))
    each = compare("pipedream", found, schedule, rules, RunPrediction(source="x", durations=cost, network=network))
    steps = list(each.steps.values())
    assert min(steps) < each.seconds < max(steps)
    assert sum(steps[-24:-12]) / 12 == pytest.approx(each.seconds)


def test_without_messages_the_prediction_is_too_short_by_the_communication():
    found, schedule, rules = run("1f1b", LATENCY)
    own = RunPrediction(source=MEAN_TIMES, durations=mean_durations(found, schedule, range(1, 99)))
    each = compare("1f1b", found, schedule, rules, own)
    step, communication = row(each, "a step"), row(each, "of it communication")
    assert step.error < 0
    assert step.measured - step.predicted == pytest.approx(communication.measured)
    assert communication.predicted == 0


def test_steps_after_which_the_run_paused_are_left_out():
    found, schedule, rules = run("pb")
    prediction = RunPrediction(source="x", durations=cost)
    every = compare("pb", found, schedule, rules, prediction).steps
    fewer = compare("pb", found, schedule, rules, prediction, paused=[20, 25]).steps
    assert set(every) - set(fewer) == {20, 25}
    assert min(every) == schedule.drain + 2


def test_bytes_by_stage():
    found, schedule, rules = run("pb")
    prediction = RunPrediction(source="x", durations=cost, weights=(1, 2, 3, 4), activations=(10, 10, 10, 10))
    held = {"weights": [1, 2, 3, 8], "activations": [70, 50, 30, 20]}
    each = compare("pb", found, schedule, rules, prediction, held=held)
    assert row(each, "stage 0, forwards held").measured == row(each, "stage 0, forwards held").predicted == 7
    assert row(each, "stage 3, weights").error == -0.5
    assert row(each, "stage 0, activations").predicted == 70
    assert row(each, "stage 3, activations").error == -0.5
    assert row(compare("pb", found, schedule, rules, prediction), "stage 3, weights").error is None


def test_emulated_runs_are_predicted_as_one_device():
    found, schedule, rules = run("pb")
    for recording in found:
        recording.process = 1
    each = compare("pb", found, schedule, rules, RunPrediction(source="x", durations=cost))
    assert each.emulated
    assert each.seconds == pytest.approx(sum(cost(a) for body in schedule.body for a in body) / 1e9)
    assert not any("stands still" in compared.name for compared in each.rows)


@pytest.mark.parametrize("name", ["pb", "gpipe"])
def test_a_run_without_a_steady_state_is_compared_step_by_step(name):
    found, schedule, rules = run(name, LATENCY, turns=3)
    network = Network(Link(LATENCY))
    each = compare(name, found, schedule, rules, RunPrediction(source="x", durations=cost, network=network))
    assert list(each.steps) == list(each.expected) == [1, 2, 3]
    assert max(map(abs, each.errors)) < 1e-9
    assert not any(compared.error for compared in each.rows if compared.unit)
    assert row(each, "all steps").measured == pytest.approx(sum(each.steps.values()))
    silent = compare(name, found, schedule, rules, RunPrediction(source="x", durations=cost))
    assert row(silent, "all steps").error < 0


def test_a_short_emulated_run_is_predicted_as_the_work_of_its_own_turns():
    found, schedule, rules = run("pb", turns=3)
    for recording in found:
        recording.process = 1
    each = compare("pb", found, schedule, rules, RunPrediction(source="x", durations=cost))
    forwards = sum(cost(action) for body in schedule.body for action in body if action.kind == "F")
    everything = sum(cost(action) for body in schedule.body for action in body)
    assert each.expected[1] == pytest.approx((forwards + cost(Action("B", 3, 0)) + cost(Action("U", 3, 0))) / 1e9)
    assert sum(each.expected.values()) == pytest.approx(3 * everything / 1e9)


def test_nothing_recorded_is_not_compared():
    _, schedule, rules = run("pb", turns=1)
    prediction = RunPrediction(source="x", durations=cost)
    assert compare("pb", [Recording(w) for w in range(4)], schedule, rules, prediction) is None


def test_the_chart_and_the_page():
    found, schedule, rules = run("pb", LATENCY)
    each = compare("pb", found, schedule, rules, RunPrediction(source="nothing at all", durations=cost))
    rows = rows_of(predicted_chart(each))
    assert sum(row["what"] == "measured" for row in rows) == len(each.steps)
    told = [row["value"] for row in rows if row["what"] == "predicted"]
    assert told == pytest.approx([each.seconds * 1e3] * 2, rel=1e-4)
    assert '"title": "a step, ms"' in json.dumps(predicted_chart(each).to_dict())
    compared, plain = render(make_page((), predicted=(each,))), render(make_page(()))
    for part in ("<h2>Predicted and measured</h2>", "nothing at all", "of it communication", 'id="predicted-0"'):
        assert part in compared
    assert "<h2>Predicted and measured</h2>" not in plain
