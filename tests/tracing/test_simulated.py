"""A simulation's recordings against what is known of it in closed form."""

import itertools

import pytest

from stretto import method
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.simulate import simulate
from stretto.simulate.timeline import recordings
from stretto.tracing import Mark, Recording, Span


def recorded(schedule: Schedule, rules: Rules, turns: int, latency: float = 0) -> list[Recording]:
    timeline = simulate(schedule, rules, turns, latency=latency)
    return recordings(timeline, rules, unit=10)


def lane(recording: Recording, name: str) -> list[Span]:
    return [span for span in recording.spans if span.lane == name]


def test_two_stages_of_gpipe_on_one_micro_batch_with_a_latency() -> None:
    """Worker 1 forwards, then works back, half a unit of travel each way.

    1 ~FBB
    0 F    ~BB
    """
    body = tuple((Action("F", s, 0), Action("B", s, 0), Action("U", s, 0)) for s in range(2))
    schedule = Schedule(body)
    first, second = recorded(schedule, Rules.of(schedule, Reach((None, 1))), 1, latency=0.5)
    assert lane(first, "compute") == [
        Span("compute", "0F0", 0, 10),
        Span("compute", "0B0", 50, 70),
        Span("compute", "0U0", 70, 70),
    ]
    assert lane(first, "wait") == [Span("wait", "1B0", 10, 50)]
    assert lane(second, "wait") == [Span("wait", "0F0", 0, 15)]
    assert (first.sends, second.receipts) == ([Mark("activation 0>1", 0, 10)], [Mark("activation 0>1", 0, 15)])
    assert (second.sends, first.receipts) == ([Mark("gradient 1>0", 0, 45)], [Mark("gradient 1>0", 0, 50)])
    assert (first.name, second.name) == ("worker 0: stage 0", "worker 1: stage 1")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "pb", "overlapping", "greedy", "pipedream"])
def test_every_message_has_both_ends_and_every_worker_its_time(name: str) -> None:
    schedule, rules = method(name).plan(4, 2)
    timeline = simulate(schedule, rules, 5, latency=0.25)
    made = recordings(timeline, rules)
    sends = sorted(mark for each in made for mark in each.sends)
    receipts = sorted(mark for each in made for mark in each.receipts)
    assert len({mark[:2] for mark in sends}) == len(sends)
    assert [(channel, number, time + 250_000) for channel, number, time in sends] == receipts
    for recording, busy in zip(made, timeline.busy, strict=True):
        spans = sorted(recording.spans, key=lambda span: (span.start, span.end))
        assert sum(span.end - span.start for span in lane(recording, "compute")) == busy * 1_000_000
        assert spans[0].start == 0
        assert all(a.end == b.start for a, b in itertools.pairwise(spans)), "compute and wait fill all time"
