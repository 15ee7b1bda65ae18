"""Ramp, steady state and drain of recordings whose phases are known, and pauses cut out of them."""

import pytest

import stretto
from stretto.simulate import simulate
from stretto.simulate.timeline import recordings
from stretto.tracing import Recording
from stretto.tracing.recording import PAUSE, pauses, without_pauses
from stretto.tracing.run_phases import (
    EVERY_TURN,
    RunPhase,
    by_step,
    drained,
    drains_each_turn,
    issued,
    shares_of,
    stretches,
)


def recorded(name, turns, stages=4):
    schedule, rules = stretto.method(name).plan(stages, None)
    return recordings(simulate(schedule, rules, turns), rules, unit=1), schedule, rules


def test_pipelined_backpropagation_of_ten_turns():
    """F = 1, B = 2: stage 0's first backward ends at 12, as F0 reaches stage 3 at 3 and B0 is back at 12.

    Worker 0 then does F7 B1, F8 B2, F9 B3, three units each: the steady state, until 21. B9 ends at 39.
    """
    found, schedule, rules = recorded("pb", 10)
    (only,) = stretches(found, schedule, rules)
    assert only.turns == range(10)
    assert only.steady == range(7, 10)
    assert only.phases == (
        RunPhase("ramp", 0, 12, range(7)),
        RunPhase("steady", 12, 21, range(7, 10)),
        RunPhase("drain", 21, 39, range(0)),
    )


def test_each_step_of_a_synchronous_pipeline_has_a_ramp_and_a_drain():
    """1F1B, four micro-batches on two stages: a turn takes (M + S - 1) (F + B) = 15, stage 1 from 1 to 13 of it."""
    found, schedule, rules = recorded("1f1b(microbatches=4)", 3, stages=2)
    (only,) = stretches(found, schedule, rules)
    assert only.steady == range(1, 3)
    assert [(phase.name, phase.start, phase.end) for phase in only.phases] == [
        (name, start + 15 * step, end + 15 * step)
        for step in range(3)
        for name, start, end in (("ramp", 0, 1), ("steady", 1, 13), ("drain", 13, 15))
    ]
    steps = by_step(only.phases, only.steady)
    assert steps == {step: {"ramp": 1e-9, "steady": 12e-9, "drain": 2e-9} for step in (2, 3)}
    assert shares_of(steps)["drain"] == pytest.approx((2e-9, 2 / 15, 2 / 15, 2 / 15))


@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "count"), [("gpipe(microbatches=6)", 6), ("1f1b(microbatches=6)", 6), ("backprop", 1)]
)
def test_ramp_and_drain_are_the_bubble_of_a_step(name, count, stages):
    """(S - 1) F until the last stage begins, (S - 1) B once it has finished: the share (S - 1) / (M + S - 1)."""
    found, schedule, rules = recorded(name, 2, stages=stages)
    (only,) = stretches(found, schedule, rules)
    shares = shares_of(by_step(only.phases, range(2)))
    assert shares["ramp"].seconds == pytest.approx((stages - 1) * 1e-9)
    assert shares["drain"].seconds == pytest.approx((stages - 1) * 2e-9)
    assert shares["ramp"].mean + shares["drain"].mean == pytest.approx((stages - 1) / (count + stages - 1))
    assert only.end == 3 * (count + stages - 1) * 2


def test_an_update_that_waits_for_all_stages_is_no_work_of_the_first_to_finish():
    """With clipping the last stage, which ends its backwards at 13 of 15, waits for the norm of the other one."""
    schedule, rules = stretto.method("1f1b(microbatches=4)").plan(2, None, reduce=True)
    found = recordings(simulate(schedule, rules, 2), rules, unit=1)
    (only,) = stretches(found, schedule, rules)
    drains = [(phase.start, phase.end) for phase in only.phases if phase.name == "drain"]
    assert drains == [(13, 15), (28, 30)]


def test_what_passes_between_two_steps_is_no_part_of_a_drain():
    found, schedule, rules = joined("gpipe", [2, 1])
    (only,) = stretches(found, schedule, rules)
    drains = [phase for phase in only.phases if phase.name == "drain"]
    ramps = [phase for phase in only.phases if phase.name == "ramp"]
    assert [(phase.turns, ramp.start - phase.end) for phase, ramp in zip(drains, ramps[1:], strict=False)] == [
        (range(1), 0),
        (range(1, 2), 1000 - drains[1].end),
    ]


def test_steps_whose_beginning_was_dropped_have_no_phases():
    found, schedule, rules = recorded("gpipe", 4)
    for worker, recording in enumerate(found):
        recording.dropped = 5
        del recording.spans[: 3 + worker]
    (only,) = stretches(found, schedule, rules)
    assert {phase.turns for phase in only.phases} == {range(step, step + 1) for step in (1, 2, 3)}


def test_greedy_updates_fill_in_time_not_in_turns():
    """No worker waits for a gradient: all are busy once F1 has come to stage 3, which was busy with F0 B0 before."""
    found, schedule, rules = recorded("greedy", 5)
    (only,) = stretches(found, schedule, rules)
    assert [(phase.name, phase.start, phase.end) for phase in only.phases] == [
        ("ramp", 0, 6),
        ("steady", 6, 15),
        ("drain", 15, 18),
    ]


@pytest.mark.parametrize("name", ["pb", "pipedream", "1f1b", "zb-h1", "overlapping", "overlapping(delay=1)", "greedy"])
@pytest.mark.parametrize("turns", [1, 2, 5, 12])
def test_phases_follow_each_other_and_cover_the_run(name, turns):
    found, schedule, rules = recorded(name, turns)
    (only,) = stretches(found, schedule, rules)
    spans = [span for recording in found for span in recording.spans if span.lane == "compute"]
    times = [time for phase in only.phases for time in (phase.start, phase.end)]
    assert times == sorted(times)
    assert times[1:-1:2] == times[2::2]
    assert (times[0], times[-1]) == (min(span.start for span in spans), max(span.end for span in spans))
    names = [phase.name for phase in only.phases]
    if drains_each_turn(schedule, rules):
        drains = ["drain"] * (name != "zb-h1")  # its weight gradients keep every worker busy to the end
        assert names == ["ramp", "steady", *drains] * turns
    else:
        assert names in (["ramp", "steady", "drain"], ["ramp", "drain"], ["ramp", "steady"], ["ramp"])
    assert len(only.steady) == max(0, turns - schedule.drain - 1)


def joined(name, lengths):
    """Recordings of a run that was drained between stretches of these lengths."""
    schedule, rules = stretto.method(name).plan(4, None)
    whole, entered, now = [Recording(worker) for worker in range(4)], 0, 0
    for length in lengths:
        for copy, recording in zip(whole, recordings(simulate(schedule, rules, length), rules, unit=1), strict=True):
            for lane, name_, start, end in recording.spans:
                if lane == "compute":
                    stage, number = name_[:2], int(name_[2:]) + entered * schedule.per_turn
                    copy.span(lane, f"{stage}{number}", start + now, end + now)
        entered, now = entered + length, now + 1000
    return whole, schedule, rules


@pytest.mark.parametrize("name", ["pb", "pipedream", "zb-h1"])
def test_a_drain_in_the_middle_is_found(name):
    found, schedule, rules = joined(name, [9, 3, 12])
    parts = stretches(found, schedule, rules)
    lengths = [len(part.turns) for part in parts]
    assert lengths == ([9, 3, 12] if schedule.drain else [24])
    if schedule.drain:
        assert [part.start for part in parts] == [0, 1000, 2000]
        workers = [issued(recording, schedule, EVERY_TURN) for recording in found]
        assert drained(workers, schedule) == {9, 12}


def test_dropped_events_are_no_ramp():
    found, schedule, rules = recorded("pb", 20)
    for recording in found:
        recording.dropped = 5
    (only,) = stretches(found, schedule, rules)
    assert not only.whole
    assert [phase.name for phase in only.phases] == ["steady", "drain"]


def test_nothing_recorded_has_no_phase():
    _, schedule, rules = recorded("pb", 1)
    assert stretches([Recording(worker) for worker in range(4)], schedule, rules) == []


def test_a_pause_is_where_all_workers_pause():
    first, second = Recording(0), Recording(1)
    first.span(PAUSE, "evaluation", 10, 30)
    second.span(PAUSE, "evaluation", 15, 32)
    second.span(PAUSE, "evaluation", 32, 40)
    first.span(PAUSE, "checkpoint", 50, 60)
    assert pauses([first, second]) == [(15, 30)]
    assert pauses([first]) == [(10, 30), (50, 60)]


def test_the_clock_stands_still_in_a_pause():
    first, second = Recording(0), Recording(1)
    for recording in (first, second):
        recording.span(PAUSE, "evaluation", 10, 30)
        recording.span(PAUSE, "evaluation", 40, 45)
    first.span("compute", "0F0", 0, 10)
    first.span("compute", "0F1", 30, 40)
    second.span("wait", "0F0", 5, 35)
    second.received("activation 0>1", 1, 46)
    second.count("delay", 20, 3)
    one, other = without_pauses([first, second])
    assert [(span.name, span.start, span.end) for span in one.spans] == [("0F0", 0, 10), ("0F1", 10, 20)]
    assert [(span.start, span.end) for span in other.spans] == [(5, 15)]
    assert other.receipts[0].time == 21
    assert other.counts[0].time == 10
