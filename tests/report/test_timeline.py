"""The section on timelines: which turns it shows, what they are compared with, what the charts hold."""

import json

import pytest

import stretto
from pairwise import in_turn, slow_where
from stretto.report import units
from stretto.report.html import render
from stretto.report.recorded_run import Band, Bar, timelines, window
from stretto.report.timeline import timeline_chart
from stretto.schedule import Action
from stretto.simulate import period, simulate
from stretto.simulate.timeline import recordings
from stretto.tracing import Recording

from .synthetic import make_page, recorded
from .synthetic import run as made
from .test_charts import rows_of

METHODS = ("1f1b", "gpipe", "pb", "pipedream", "overlapping", "zb-h1")
COST = {"F": 1_000_000, "B": 2_000_000, "I": 1_000_000, "W": 1_000_000, "U": 100_000, "C": 1_000_000, "R": 0}


def cost(action):
    return COST[action.kind] * (1 + action.stage)


def run(name, turns=60, latency=0, durations=cost):
    """Recordings of workers whose every wait is known, as if each were a process."""
    schedule, rules = stretto.method(name).plan(4, None)
    found = recordings(simulate(schedule, rules, turns, durations, latency=latency), rules, unit=1)
    for recording in found:
        recording.process = recording.worker
    return found, schedule, rules


@pytest.mark.parametrize("name", slow_where(("gpipe", "pipedream", "overlapping").__contains__, METHODS))
def test_workers_that_only_do_what_the_simulation_does_look_like_it(name):
    found, schedule, rules = run(name)
    each = timelines(recorded("run", name, found, schedule, rules))
    assert not each.emulated
    assert each.measured.seconds == pytest.approx(each.simulated.seconds)
    assert each.measured.seconds / each.turns == pytest.approx(each.period)
    assert each.measured.busy == pytest.approx(each.simulated.busy)
    looks = [
        [(bar.worker, bar.kind, bar.start, bar.end) for bar in part.bars] for part in (each.measured, each.simulated)
    ]
    for (*who, start, end), (*other, at, until) in zip(sorted(looks[0]), sorted(looks[1]), strict=True):
        assert (who, start, end) == (other, pytest.approx(at, abs=1e-9), pytest.approx(until, abs=1e-9))


@pytest.mark.parametrize("name", slow_where("pipedream".__eq__, ["1f1b", "pipedream", "backprop"]))
def test_what_the_measured_turns_take_longer_is_communication(name):
    latency = 3_000_000
    found, schedule, rules = run(name, latency=latency)
    each = timelines(recorded("run", name, found, schedule, rules))
    assert each.measured.seconds / each.turns == pytest.approx(period(schedule, rules, cost, latency=latency) / 1e9)
    assert each.period == pytest.approx(period(schedule, rules, cost) / 1e9)
    assert each.measured.busy < each.simulated.busy


def test_the_window_is_one_of_median_length_so_that_a_pause_is_not_shown():
    found, schedule, rules = run("pb", durations=lambda action: cost(action) + 10**9 * (action == Action("F", 0, 30)))
    each = timelines(recorded("run", "pb", found, schedule, rules))
    assert each.measured.seconds < 0.2
    assert max(bar.end - bar.start for bar in each.measured.bars) < 0.1


def test_bars_are_cut_off_at_both_ends_and_what_is_no_action_is_left_out():
    recording = Recording(0)
    recording.span("compute", "0F0", 0, 10)
    recording.span("wait", "1B0", 10, 30)
    recording.span("compute", "0B0", 30, 50)
    recording.span("compute", "warm-up", 12, 13)
    recording.span("send", "0F0", 10, 12)
    recording.span("compute", "0F1", 50, 60)
    assert window([recording], 5, 45).bars == (
        Bar(0, "F", "0F0", 0, 5e-9),
        Bar(0, "wait", "1B0", 5e-9, 25e-9),
        Bar(0, "B", "0B0", 25e-9, 40e-9),
    )
    assert window([recording], 5, 45).busy == pytest.approx(20 / 40)


@pytest.mark.parametrize(("name", "turns"), in_turn(["pb", "gpipe", "pipedream", "greedy"], [1, 3], rounds=2, slow=1))
def test_a_run_without_a_steady_state_is_compared_with_as_many_simulated_turns(name, turns):
    found, schedule, rules = run(name, turns=turns)
    each = timelines(recorded("run", name, found, schedule, rules))
    assert each.period is None
    assert each.turns == turns
    assert not each.parts
    assert f"step{'s 1 to' * (turns > 1)} {turns} of {turns}" in each.steps
    assert sorted(each.measured.bars) == sorted(each.simulated.bars)
    assert each.measured.bands == each.simulated.bands
    assert [band.name for band in each.measured.bands][:: len(each.measured.bands) - 1] == ["ramp", "drain"]


def test_ramp_and_drain_of_a_long_run_have_charts_of_their_own():
    found, schedule, rules = run("pb", turns=40)
    each = timelines(recorded("run", "pb", found, schedule, rules))
    assert [band.name for band in each.measured.bands] == ["steady"]
    assert [part.title for part in each.parts] == ["Ramp: steps 1 to 10", "Drain: steps 37 to 40"]
    for part, names in zip(each.parts, (["ramp", "steady"], ["steady", "drain"]), strict=True):
        assert [band.name for band in part.measured.bands] == [band.name for band in part.simulated.bands] == names
        assert part.measured.seconds == pytest.approx(part.simulated.seconds)


def test_of_a_synchronous_run_ramp_and_drain_are_told_for_each_step():
    """1F1B with four micro-batches on four stages; stage s takes s + 1 times as long as the first one.

    The ramp are the forwards of stages 0 to 2, the drain their last backwards and updates, and the last stage has
    updated by then. Step 31 begins with forwards of twice that: more of it is ramp.
    """
    slow = {Action("F", stage, 4 * 30) for stage in range(3)}
    found, schedule, rules = run("1f1b(microbatches=4)", durations=lambda action: cost(action) * (1 + (action in slow)))
    run_of = recorded("run", "1f1b", found, schedule, rules)
    each = timelines(run_of)
    measured, simulated = each.shares["ramp"]
    steps = len(run_of.steady)
    assert simulated.seconds == pytest.approx(6e-3 * (1 + 1 / (4 * steps)))  # of mean forwards, four in a step
    assert simulated[1:] == pytest.approx([simulated.mean] * 3)
    assert measured.least == pytest.approx(simulated.mean, rel=0.01)
    assert measured.seconds == pytest.approx(6e-3 * (1 + 1 / steps))
    assert measured.most > 1.5 * measured.mean
    assert each.shares["drain"][1].seconds == pytest.approx((2 + 4 + 6) * 1e-3 + 0.1e-3 - 0.4e-3)
    assert [part.title for part in each.parts] == [f"From the start: steps 1 to {1 + each.turns // 2}"]
    page = render(make_page((), timelines=(each,)))
    assert "<th>of a step, mean in the steady state (least to most)</th>" in page
    assert f"<td>{units.part(*measured)}</td><td>{units.part(*simulated)}</td>" in page


def test_of_a_run_whose_beginning_was_dropped_no_ramp_is_shown():
    found, schedule, rules = run("pb", turns=40)
    for recording in found:
        recording.dropped = 1
    each = timelines(recorded("run", "pb", found, schedule, rules))
    assert [part.title for part in each.parts] == ["Drain: steps 37 to 40"]


def test_nothing_recorded_has_no_timeline():
    _, schedule, rules = run("pb", turns=1)
    assert timelines(recorded("run", "pb", [Recording(worker) for worker in range(4)], schedule, rules)) is None


def test_synchronous_phases_are_not_shown():
    slow, schedule, rules = run(
        "pb", durations=lambda action: cost(action) * (1 if 20 <= action.microbatch < 40 else 9)
    )
    each = timelines(recorded("run", "pb", slow, schedule, rules, among=range(20, 40)))
    assert each.period == pytest.approx(period(schedule, rules, cost) / 1e9)
    assert {int(bar.name[2:]) for bar in each.measured.bars if bar.kind == "F"} <= set(range(20, 40))


def test_the_chart_holds_every_bar_in_the_unit_of_its_axis():
    bars = (Bar(0, "F", "0F7", 0.0, 0.002), Bar(1, "wait", "0F7", 0.0, 0.002), Bar(1, "B", "1B6", 0.002, 0.00201))
    chart = timeline_chart(bars, 3, 0.004, {"F", "B", "wait"})
    rows = {(row["worker"], row["kind"], row["from"], row["to"], row["label"]) for row in rows_of(chart)}
    assert rows == {
        ("worker 0", "forward", 0, 2, "0F7"),
        ("worker 1", "wait", 0, 2, ""),
        ("worker 1", "backward", 2, 2.01, ""),
    }
    spec = json.dumps(chart.to_dict())
    assert '"title": "ms"' in spec
    assert '["worker 0", "worker 1", "worker 2"]' in spec
    assert '"domain": ["forward", "backward", "wait"]' in spec


def test_the_page_shows_traced_runs_and_says_what_was_emulated():
    found, schedule, rules = run("pb", latency=5_000_000)
    real = timelines(recorded("real", "pb", found, schedule, rules))
    for recording in found:
        recording.process = 1
    emulated = timelines(recorded("emulated", "pb", found, schedule, rules))
    page = render(make_page((made([2.0, 1.0]),), timelines=(real,)))
    assert "<h2>Timelines</h2>" in page
    assert 'id="timeline-0-measured"' in page
    assert 'id="timeline-0-simulated"' in page
    assert ">6 turns of the steady state" in page
    assert "<h4>Drain: " in page
    assert "was emulated" not in page
    assert "was emulated" in render(make_page((), timelines=(emulated,)))
    assert "<h2>Timelines</h2>" not in render(make_page(()))
    short = render(make_page((), timelines=(timelines(recorded("short", "pb", *run("pb", turns=3))),)))
    assert "too short for a steady state (steps 1 to 3 of 3; the ramp takes 7 steps)" in short
    assert "turns of the steady state" not in short


def test_the_hint_of_an_action_names_its_longest_operations():
    found, schedule, rules = run("greedy", turns=3)
    for span in found[0].spans:
        if span.name in ("0F0", "0F1"):
            for name, share in (("aten::addmm", 0.5), ("aten::relu", 0.1 if span.name == "0F0" else 0.3)):
                found[0].span("operation", name, span.start + int(name == "aten::relu") * 600_000,
                              span.start + int(name == "aten::relu") * 600_000 + int(share * 1_000_000))  # fmt: skip
            found[0].span("operation", "aten::empty", span.start + 10, span.start + 20)  # inside addmm
    each = timelines(recorded("run", "greedy", found, schedule, rules))
    assert each.operations == {("F", 0): {"aten::addmm": pytest.approx(5e-4), "aten::relu": pytest.approx(2e-4)}}
    bars = [Bar(0, "F", "0F2", 0, 1), Bar(1, "F", "1F2", 0, 1), Bar(0, "wait", "0F2", 1, 2)]
    chart = timeline_chart(bars, 2, 2, {"F", "wait"}, inside={("F", 0): "aten::addmm 500 µs"})
    assert [row["inside"] for row in rows_of(chart)] == ["aten::addmm 500 µs", "–", "–"]


def test_phases_are_shaded_and_named_above_the_workers():
    bars = (Bar(0, "F", "0F7", 0.0, 0.002),)
    bands = (Band("ramp", 0.0, 0.003), Band("drain", 0.003, 0.00301))
    spec = timeline_chart(bars, 1, 0.004, {"F"}, bands).to_dict()
    shade, *_, names = spec["layer"]
    assert [
        (row["phase"], row["from"], row["to"], row["label"]) for row in spec["datasets"][shade["data"]["name"]]
    ] == [("ramp", 0, 3, "ramp"), ("drain", 3, 3.01, "")]
    assert shade["mark"]["opacity"] < 0.3
    assert names["encoding"]["y"]["field"] == "worker"
    assert '["phase", "worker 0"]' in json.dumps(spec)
