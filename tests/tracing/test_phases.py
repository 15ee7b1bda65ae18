"""Ramp, steady state and drain of recordings whose phases are known, and pauses cut out of them."""

import pytest

import stretto
from stretto.simulate import simulate
from stretto.simulate.timeline import recordings
from stretto.tracing import Recording
from stretto.tracing.recording import PAUSE, pauses, without_pauses
from stretto.tracing.run_phases import EVERY_TURN, RunPhase, drained, issued, stretches


def recorded(name, turns, stages=4):
    schedule, rules = stretto.method(name).plan(stages, None)
    return recordings(simulate(schedule, rules, turns), rules, unit=1), schedule


def test_pipelined_backpropagation_of_ten_turns():
    """F = 1, B = 2: stage 0's first backward ends at 12, as F0 reaches stage 3 at 3 and B0 is back at 12.

    Worker 0 then does F7 B1, F8 B2, F9 B3, three units each: the steady state, until 21. B9 ends at 39.
    """
    found, schedule = recorded("pb", 10)
    (only,) = stretches(found, schedule)
    assert only.turns == range(10)
    assert only.steady == range(7, 10)
    assert only.phases == (
        RunPhase("ramp", 0, 12, range(7)),
        RunPhase("steady", 12, 21, range(7, 10)),
        RunPhase("drain", 21, 39, range(0)),
    )


def test_a_synchronous_pipeline_of_three_minibatches():
    """1F1B, four micro-batches on two stages: a turn takes (M + S - 1) (F + B) = 15, stage 1 from 1 to 13 of it."""
    found, schedule = recorded("1f1b(microbatches=4)", 3, stages=2)
    (only,) = stretches(found, schedule)
    assert [(phase.name, phase.start, phase.end) for phase in only.phases] == [
        ("ramp", 0, 16),
        ("steady", 16, 43),
        ("drain", 43, 45),
    ]


def test_greedy_updates_fill_in_time_not_in_turns():
    """No worker waits for a gradient: all are busy once F1 has come to stage 3, which was busy with F0 B0 before."""
    found, schedule = recorded("greedy", 5)
    (only,) = stretches(found, schedule)
    assert [(phase.name, phase.start, phase.end) for phase in only.phases] == [
        ("ramp", 0, 6),
        ("steady", 6, 15),
        ("drain", 15, 18),
    ]


@pytest.mark.parametrize("name", ["pb", "pipedream", "1f1b", "zb-h1", "overlapping", "overlapping(delay=1)", "greedy"])
@pytest.mark.parametrize("turns", [1, 2, 5, 12])
def test_phases_follow_each_other_and_cover_the_run(name, turns):
    found, schedule = recorded(name, turns)
    (only,) = stretches(found, schedule)
    spans = [span for recording in found for span in recording.spans if span.lane == "compute"]
    times = [time for phase in only.phases for time in (phase.start, phase.end)]
    assert times == sorted(times)
    assert times[1:-1:2] == times[2::2]
    assert (times[0], times[-1]) == (min(span.start for span in spans), max(span.end for span in spans))
    assert [phase.name for phase in only.phases] in (
        ["ramp", "steady", "drain"], ["ramp", "drain"], ["ramp", "steady"], ["ramp"],
    )  # fmt: skip
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
    return whole, schedule


@pytest.mark.parametrize("name", ["pb", "pipedream", "zb-h1"])
def test_a_drain_in_the_middle_is_found(name):
    found, schedule = joined(name, [9, 3, 12])
    parts = stretches(found, schedule)
    lengths = [len(part.turns) for part in parts]
    assert lengths == ([9, 3, 12] if schedule.drain else [24])
    if schedule.drain:
        assert [part.start for part in parts] == [0, 1000, 2000]
        workers = [issued(recording, schedule, EVERY_TURN) for recording in found]
        assert drained(workers, schedule) == {9, 12}


def test_dropped_events_are_no_ramp():
    found, schedule = recorded("pb", 20)
    for recording in found:
        recording.dropped = 5
    (only,) = stretches(found, schedule)
    assert not only.whole
    assert [phase.name for phase in only.phases] == ["steady", "drain"]


def test_nothing_recorded_has_no_phase():
    _, schedule = recorded("pb", 1)
    assert stretches([Recording(worker) for worker in range(4)], schedule) == []


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
