"""A trace is parsed back with Perfetto's own definitions, and holds every span, message and count."""

from pathlib import Path
from typing import Any

import pytest

from stretto.tracing import Recording, perfetto


def parsed(recordings: list[Recording], folder: Path) -> list[Any]:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    file = folder / "deep" / "run.pftrace"
    perfetto.write(recordings, file)
    assert [path.name for path in file.parent.iterdir()] == ["run.pftrace"]
    trace = Trace()
    trace.ParseFromString(file.read_bytes())
    assert len({packet.trusted_packet_sequence_id for packet in trace.packet}) == 1
    return list(trace.packet)


def described(packets: list[Any]) -> dict[int, Any]:
    """Tracks by number; each is described before it is used."""
    tracks: dict[int, Any] = {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in tracks
            assert packet.track_descriptor.parent_uuid in {0, *tracks}
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        else:
            assert packet.track_event.track_uuid in tracks
    return tracks


def events(packets: list[Any], kind: str) -> list[Any]:
    return [
        packet
        for packet in packets
        if packet.HasField("track_event") and packet.track_event.type == packet.track_event.Type.Value(kind)
    ]


def place(tracks: dict[int, Any], packet: Any) -> tuple[str, str]:
    """Process and thread, or process and counter, of an event."""
    track = tracks[packet.track_event.track_uuid]
    return tracks[track.parent_uuid].process.process_name, track.thread.thread_name or track.name


def slices(packets: list[Any]) -> list[tuple[str, str, str, int, int]]:
    """Spans as a viewer builds them: sorted by time, equal times in the order of packets, an end closes a begin."""
    tracks, found, open_slices = described(packets), [], {}
    timed = [packet for packet in packets if packet.HasField("track_event")]
    for packet in sorted(timed, key=lambda packet: packet.timestamp):
        event = packet.track_event
        kind = event.Type.Name(event.type)
        if kind == "TYPE_SLICE_BEGIN":
            assert event.track_uuid not in open_slices, "slices of a track overlap"
            open_slices[event.track_uuid] = packet
        elif kind == "TYPE_SLICE_END":
            begin = open_slices.pop(event.track_uuid)
            found.append((*place(tracks, begin), begin.track_event.name, begin.timestamp, packet.timestamp))
    assert not open_slices
    return found


def two_workers() -> list[Recording]:
    first, second = Recording(0, name="stage 0"), Recording(1, name="stage 1", offset=1000)
    first.span("compute", "0F0", 10, 20)
    first.span("compute", "0U0", 20, 20)  # takes no time
    first.span("compute", "0F1", 20, 30)
    first.sent("activation 0>1", 0, 21)
    first.sent("activation 0>1", 1, 31)  # never arrives
    first.received("gradient 1>0", 0, 70)
    first.count("delay of stage 0", 30, 2)
    first.count("delay of stage 0", 40, 3)
    first.count("share", 40, 0.5)
    second.received("activation 0>1", 0, -970)
    second.span("wait", "0F0", -995, -970)
    second.span("compute", "1F0", -970, -960)
    second.sent("gradient 1>0", 0, -950)
    return [first, second]


def test_every_span_is_there_and_closes(tmp_path: Path) -> None:
    found = slices(parsed(two_workers(), tmp_path))
    assert [span for span in found if span[0] == "stage 0"] == [
        ("stage 0", "compute", "0F0", 10, 20),
        ("stage 0", "compute", "0U0", 20, 20),
        ("stage 0", "compute", "0F1", 20, 30),
    ]
    assert [span for span in found if span[0] == "stage 1"] == [
        ("stage 1", "wait", "0F0", 5, 30),
        ("stage 1", "compute", "1F0", 30, 40),
    ]


def test_workers_are_processes_of_their_own_whatever_the_machine_calls_them(tmp_path: Path) -> None:
    tracks = described(parsed(two_workers(), tmp_path))
    processes = [track for track in tracks.values() if track.HasField("process")]
    threads = [track for track in tracks.values() if track.HasField("thread")]
    assert [process.process.process_name for process in processes] == ["stage 0", "stage 1"]
    assert len({process.process.pid for process in processes}) == 2
    assert len({thread.thread.tid for thread in threads}) == len(threads)
    assert all(thread.thread.pid == tracks[thread.parent_uuid].process.pid for thread in threads)
    assert two_workers()[0].host in processes[0].process.process_labels[0]


def test_a_message_flows_from_its_send_to_its_receipt(tmp_path: Path) -> None:
    packets = parsed(two_workers(), tmp_path)
    tracks = described(packets)
    begins, ends, alone = {}, {}, []
    for packet in events(packets, "TYPE_INSTANT"):
        at = (*place(tracks, packet), packet.track_event.name, packet.timestamp)
        for flow in packet.track_event.flow_ids:
            assert flow not in begins
            begins[flow] = at
        for flow in packet.track_event.terminating_flow_ids:
            assert flow not in ends
            ends[flow] = at
        if not packet.track_event.flow_ids and not packet.track_event.terminating_flow_ids:
            alone.append(at)
    assert sorted((begins[flow], ends[flow]) for flow in begins.keys() | ends.keys()) == [
        (("stage 0", "send", "activation 0>1 0 sent", 21), ("stage 1", "receive", "activation 0>1 0 received", 30)),
        (("stage 1", "send", "gradient 1>0 0 sent", 50), ("stage 0", "receive", "gradient 1>0 0 received", 70)),
    ]
    assert alone == [("stage 0", "send", "activation 0>1 1 sent", 31)]


def test_counters(tmp_path: Path) -> None:
    packets = parsed(two_workers(), tmp_path)
    tracks = described(packets)
    seen = [
        (*place(tracks, each), each.timestamp, each.track_event.counter_value or each.track_event.double_counter_value)
        for each in events(packets, "TYPE_COUNTER")
    ]
    assert seen == [
        ("stage 0", "delay of stage 0", 30, 2),
        ("stage 0", "delay of stage 0", 40, 3),
        ("stage 0", "share", 40, 0.5),
    ]
    counters = [track for track in tracks.values() if track.HasField("counter")]
    assert [counter.name for counter in counters] == ["delay of stage 0", "share"]


def test_messages_that_are_on_their_way_together_get_rows_of_their_own(tmp_path: Path) -> None:
    recording = Recording(0)
    for start, end in ((0, 10), (5, 12), (10, 20), (11, 13), (12, 14)):
        recording.span("send", f"{start}", start, end)
    found = {(thread, start, end) for _, thread, _, start, end in slices(parsed([recording], tmp_path))}
    assert found == {
        ("send", 0, 10), ("send", 10, 20), ("send 2", 5, 12), ("send 2", 12, 14), ("send 3", 11, 13),
    }  # fmt: skip


def test_what_was_dropped_is_said(tmp_path: Path) -> None:
    recording = Recording(0, limit=1)
    recording.span("compute", "0F0", 0, 1)
    recording.span("compute", "0F1", 1, 2)
    packets = parsed([recording], tmp_path)
    assert "1 earlier events were dropped" in packets[0].track_descriptor.process.process_labels


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**40])
def test_lengths_are_written_as_protobuf_writes_them(number: int) -> None:
    from google.protobuf.internal.encoder import _VarintBytes

    assert perfetto.varint(number) == _VarintBytes(number)
