"""A measured and a simulated run in one trace: two groups of processes, whose messages do not cross."""

from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

import stretto
from stretto.schedule.added_actions import with_agreement
from stretto.simulate import Link, Network, simulate
from stretto.simulate.timeline import recordings
from stretto.tracing import Recording, perfetto
from stretto.tracing.recording import between, overlay


def simulated() -> list[Recording]:
    schedule, rules = stretto.method("1f1b(microbatches=2)").plan(2, 2)
    timeline = simulate(schedule, rules, 1, network=Network(Link(0.5, 0.25)), sizes=lambda edge: 2)
    return recordings(timeline, rules, unit=100)


def test_two_groups_in_one_file(tmp_path: Path) -> None:
    measured, other = simulated(), simulated()
    for each in measured:
        each.offset = 10_000
    both = overlay(measured, other)
    assert [each.name for each in both] == [
        "measured, worker 0: stage 0",
        "simulated, worker 0: stage 0",
        "measured, worker 1: stage 1",
        "simulated, worker 1: stage 1",
    ]
    assert [each.spans for each in both[::2]] == [each.spans for each in both[1::2]] == [e.spans for e in measured]
    perfetto.write(both, tmp_path / "both.pftrace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "both.pftrace").read_bytes())
    described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    assert len({track.process.pid for track in described if track.HasField("process")}) == 4
    events = [packet.track_event for packet in trace.packet if packet.HasField("track_event")]
    leaving = {flow: event.name for event in events for flow in event.flow_ids}
    coming = {flow: event.name for event in events for flow in event.terminating_flow_ids}
    assert len(leaving) == 2 * len(measured[0].sends + measured[1].sends)
    assert {flow: name.replace("sent", "received") for flow, name in leaving.items()} == coming


def test_lanes_of_messages_and_of_collectives() -> None:
    first, second = simulated()
    sends = [(span.name, span.start, span.end) for span in first.spans if span.lane == "send"]
    assert sends == [("activation 0>1 0", 100, 150), ("activation 0>1 1", 200, 250)]
    comes = [(span.name, span.start, span.end) for span in second.spans if span.lane == "receive"]
    assert comes == [("activation 0>1 0", 150, 200), ("activation 0>1 1", 250, 300)]
    schedule, rules = stretto.method("pb").plan(2, 2)
    schedule = with_agreement(schedule, "M")
    timeline = simulate(schedule, stretto.schedule.Rules.of(schedule, rules.reach), 3, lambda a: 1, overlap=True)
    for recording in recordings(timeline, rules):
        assert [span.name[1] for span in recording.spans if span.lane == "collective"] == ["M"] * 3


def test_a_stretch_of_a_recording_with_later_micro_batches() -> None:
    first, second = between(simulated(), 100, 300, later=10)
    names = [(span.lane, span.name) for span in first.spans if span.lane in ("compute", "send")]
    assert ("compute", "0F11") in names
    assert ("send", "activation 0>1 10") in names
    assert not any(name == "0F10" for _, name in names)  # it began before
    assert all(100 <= span.start < 300 for each in (first, second) for span in each.spans)
    assert [mark.number for mark in first.sends] == [10, 11]
    assert {mark.number for mark in second.receipts} <= {10, 11}
