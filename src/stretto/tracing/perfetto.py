"""Recordings of all workers as one trace for Perfetto (ui.perfetto.dev).

Each worker is a process of the trace, each lane a thread.

The format is Perfetto's own, protobuf TracePackets (perfetto.dev/docs/reference/synthetic-track-event). Importing its
library takes 70 ms, so it is imported on first use.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import UsageError
from stretto.options.extras import require
from stretto.system.destinations import writing
from stretto.tracing.operation_spans import OPERATION, by_action
from stretto.tracing.recording import Mark, Recording, Span
from stretto.tracing.run_phases import RunPhase

SEQUENCE = 1  # the id of the packet sequence that all packets belong to
LATEST = 2**63  # nanoseconds: the format has 64-bit integers, some readers signed ones
LANES = ("compute", "wait", "receive", "send", "collective", "checkpoint", "pause")  # top to bottom, above any others


def write(recordings: Sequence[Recording], file: Path, phases: Mapping[str, Sequence[RunPhase]] | None = None) -> None:
    """Write the trace to `file`, in place of an earlier one; packets are written one by one, to save memory.

    `phases` of the run are slices on tracks of their own, by name: {"phases": [ramp, steady, drain]}.
    Raises UsageError for a time that the format cannot hold, and without the extra "trace".
    """
    require("trace", "a trace for Perfetto")
    with writing(file) as temporary, temporary.open("wb") as out:
        for packet in packets(recordings, phases or {}):
            content = packet.SerializeToString()
            out.write(b"\x0a" + varint(len(content)))  # field 1 of Trace, length-delimited
            out.write(content)


def varint(number: int) -> bytes:
    """A protobuf varint: seven bits per byte, the lowest first; bit 7 is set in all bytes but the last."""
    low = []
    while number > 127:
        low.append(number & 127 | 128)
        number >>= 7
    return bytes([*low, number])


def packets(recordings: Sequence[Recording], phases: Mapping[str, Sequence[RunPhase]]) -> Iterator[Any]:
    """Yield the TracePackets, phases first, then worker by worker: each track's description, then its events."""
    tracks = itertools.count(1)
    for name, slices in phases.items():
        yield from phase_packets(next(tracks), name, slices)
    flows = flow_ids(recordings)
    for recording in recordings:
        process = next(tracks)
        yield process_track(process, recording)
        threads = lanes(recording)
        for number, thread in enumerate(threads, start=1):
            yield from thread_packets(next(tracks), number, process, recording, thread, flows)
        yield from counter_packets(tracks, process, recording)


class Thread(NamedTuple):
    """The events of one thread track: ordered spans without overlap, what is inside them, and messages."""

    name: str
    spans: Sequence[Span]
    operations: Sequence[Span] = ()  # inside them
    sends: Sequence[Mark] = ()
    receipts: Sequence[Mark] = ()


def lanes(recording: Recording) -> list[Thread]:
    """The threads of a worker, top to bottom; messages are in the lanes "send" and "receive".

    A lane with overlapping spans, as of messages, becomes several threads: "send", "send 2", ...
    """
    by_lane: dict[str, list[Span]] = {}
    for span in recording.spans:
        by_lane.setdefault(span.lane, []).append(span)
    operations = by_lane.pop(OPERATION, [])
    for lane, marks in (("send", recording.sends), ("receive", recording.receipts)):
        if marks:
            by_lane.setdefault(lane, [])
    threads = []
    for lane in sorted(by_lane, key=lambda lane: LANES.index(lane) if lane in LANES else len(LANES)):
        first, *others = without_overlap(by_lane[lane]) or [[]]
        sends = recording.sends if lane == "send" else ()
        receipts = recording.receipts if lane == "receive" else ()
        inside = operations if lane == "compute" else ()
        threads.append(Thread(lane, first, inside, sends, receipts))
        threads += [Thread(f"{lane} {number}", spans) for number, spans in enumerate(others, start=2)]
    return threads


def without_overlap(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few rows as possible so that no two spans of a row overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def flow_ids(recordings: Iterable[Recording]) -> dict[tuple[str, int], int]:
    """{(channel, number): flow id} of every message that was recorded at both ends."""
    sends, receipts = set(), set()
    for recording in recordings:
        sends |= {(channel, number) for channel, number, _ in recording.sends}
        receipts |= {(channel, number) for channel, number, _ in recording.receipts}
    return {message: flow for flow, message in enumerate(sorted(sends & receipts), start=1)}


def process_track(track: int, recording: Recording) -> Any:
    """The description of a worker's track. Its process id is the worker + 1, as real ids may repeat over hosts."""
    packet = new_packet()
    packet.track_descriptor.uuid = track
    packet.track_descriptor.process.pid = recording.worker + 1  # Perfetto reserves process 0 for the kernel
    packet.track_descriptor.process.process_name = recording.name
    packet.track_descriptor.process.process_labels.append(f"process {recording.process} on {recording.host}")
    if recording.dropped:
        packet.track_descriptor.process.process_labels.append(f"{recording.dropped} earlier events were dropped")
    return packet


def phase_packets(track: int, name: str, phases: Sequence[RunPhase]) -> Iterator[Any]:
    """Yield the description of a track of the whole run, then its phases."""
    packet = new_packet()
    packet.track_descriptor.uuid = track
    packet.track_descriptor.name = name
    yield packet
    for phase in phases:
        begin = event(track, phase.start, "TYPE_SLICE_BEGIN")
        begin.track_event.name = phase.name
        begin.track_event.categories.append("phase")
        yield begin
        yield event(track, phase.end, "TYPE_SLICE_END")


def thread_packets(
    track: int, number: int, process: int, recording: Recording, thread: Thread, flows: dict[tuple[str, int], int]
) -> Iterator[Any]:
    """Yield a thread's description, then its events. At equal times Perfetto keeps the order of the packets."""
    packet = new_packet()
    packet.track_descriptor.uuid = track
    packet.track_descriptor.parent_uuid = process
    packet.track_descriptor.thread.pid = recording.worker + 1
    packet.track_descriptor.thread.tid = 1000 * (recording.worker + 1) + number
    packet.track_descriptor.thread.thread_name = thread.name
    yield packet
    for span, inside in zip(thread.spans, by_action(thread.spans, thread.operations), strict=True):
        yield from slice_packets(track, [span, *inside])
    for marks, verb in ((thread.sends, "sent"), (thread.receipts, "received")):
        for channel, message, time in marks:
            instant = event(track, time, "TYPE_INSTANT")
            instant.track_event.name = f"{channel} {message} {verb}"
            instant.track_event.categories.append(thread.name)
            flow = flows.get((channel, message))
            if flow is not None:
                ends = instant.track_event.terminating_flow_ids
                (instant.track_event.flow_ids if verb == "sent" else ends).append(flow)
            yield instant


def slice_packets(track: int, spans: Sequence[Span]) -> Iterator[Any]:
    """Yield the begins and ends of nested spans, the outermost first."""
    open_ends: list[int] = []
    for span in spans:
        while open_ends and open_ends[-1] <= span.start:
            yield event(track, open_ends.pop(), "TYPE_SLICE_END")
        begin = event(track, span.start, "TYPE_SLICE_BEGIN")
        begin.track_event.name = span.name
        begin.track_event.categories.append(span.lane)
        yield begin
        open_ends.append(span.end)
    while open_ends:
        yield event(track, open_ends.pop(), "TYPE_SLICE_END")


def counter_packets(tracks: Iterator[int], process: int, recording: Recording) -> Iterator[Any]:
    """Yield a counter track for each counter, with its values."""
    by_name: dict[str, int] = {}
    for name, time, value in recording.counts:
        if name not in by_name:
            by_name[name] = next(tracks)
            packet = new_packet()
            packet.track_descriptor.uuid = by_name[name]
            packet.track_descriptor.parent_uuid = process
            packet.track_descriptor.name = name
            packet.track_descriptor.counter.SetInParent()
            yield packet
        packet = event(by_name[name], time, "TYPE_COUNTER")
        if isinstance(value, int):
            packet.track_event.counter_value = value
        else:
            packet.track_event.double_counter_value = value
        yield packet


def event(track: int, time: int, kind: str) -> Any:
    """A packet with one event on a track: `kind` is its type in TrackEvent, `time` is in ns.

    Raises UsageError for a later time than a trace can hold.
    """
    if time >= LATEST:
        raise UsageError(
            f"an event at {time / 1e9:.3g} s: a trace can hold {LATEST / 1e9:.3g} s, so give shorter times"
        )
    packet = new_packet()
    packet.timestamp = time
    packet.track_event.type = packet.track_event.Type.Value(kind)
    packet.track_event.track_uuid = track
    return packet


def new_packet() -> Any:
    """An empty TracePacket of the sequence."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

    packet = TracePacket()
    packet.trusted_packet_sequence_id = SEQUENCE
    return packet
