"""The recording of one worker: spans of work, messages sent and received, and counters, each with its time.

Workers and messages have the same names in all interpreters, and at both ends of a message.

Changed copies: of a part of a run, without its pauses, a measured run beside a simulated one. Pauses of training, for
an evaluation or a checkpoint, are cut out, so that they count for no step.
"""

import json
import os
import re
import socket
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from stretto.errors import UsageError
from stretto.options.checks import MOST, shown
from stretto.options.kinds import check_values, naming, read_json, read_text
from stretto.schedule import Edge, Schedule
from stretto.system.destinations import replacing

FORMAT = 1
LIMIT = 1 << 18  # events kept of a recording: about 40 MB in memory, 15 MB on disk
FILES = "trace-worker-*.jsonl"
HEADER: Mapping[str, Any] = {"worker": int, "name": str, "host": str, "process": int, "offset": int, "dropped": int}
NAME, TIME, NUMBER = {str, int, float}, {int}, {int, float}
EVENTS = {  # the types of an event's parts, by its kind
    "span": (NAME, NAME, TIME, TIME),
    "sent": (NAME, TIME, TIME),
    "received": (NAME, TIME, TIME),
    "count": (NAME, TIME, NUMBER),
}


class Span(NamedTuple):
    """A lane of a worker was busy with `name` from `start` to `end`, in ns on rank 0's clock."""

    lane: str
    name: str
    start: int
    end: int


class Mark(NamedTuple):
    """Message `number` of a channel was sent or received at `time`, in ns on rank 0's clock."""

    channel: str
    number: int
    time: int


class Count(NamedTuple):
    """The counter `name` has `value` from `time` on, in ns on rank 0's clock."""

    name: str
    time: int
    value: float


class Recording:
    """The events of one worker.

    Lanes are activities that may overlap: "compute", "wait", "send", "receive", "collective", "checkpoint", "pause"
    (training waits for an evaluation and the like); "operation" lies inside "compute", "profile" are steps under a
    profiler. A message is identified by its channel and its number there; sender and receiver use the same names
    (`tracing.naming`), so that both ends can be joined.

    Recording an event appends one tuple, from any thread, in less than a microsecond. Names and channels may be any
    objects, such as an Action: they become text only when the recording is written. Times are those of
    time.perf_counter_ns(). `offset` ns added to them give rank 0's clock (0 on one machine); it may be set at any time.

    The last `limit` events are kept, and `dropped` counts the others. All workers then keep about the same period, the
    end of the run, so that both ends of most messages are recorded.
    """

    def __init__(self, worker: int = 0, *, name: str = "", offset: int = 0, limit: int = LIMIT) -> None:
        self.worker = worker
        self.name = name or f"worker {worker}"
        self.host = socket.gethostname()
        self.process = os.getpid()
        self.offset = offset
        self.dropped = 0
        self._events: deque[tuple[Any, ...]] = deque(maxlen=limit)

    def blank(self, worker: int | None = None, *, name: str = "", offset: int = 0) -> "Recording":
        """An empty recording of the same process, of the same worker unless another is given, for all of its events."""
        number, limit = self.worker if worker is None else worker, max(LIMIT, len(self._events))
        copy = Recording(number, name=name or self.name, offset=offset, limit=limit)
        copy.host, copy.process, copy.dropped = self.host, self.process, self.dropped
        return copy

    def span(self, lane: str, name: object, start: int, end: int) -> None:
        """`lane` was busy with `name` from `start` to `end`."""
        events = self._events
        self.dropped += len(events) == events.maxlen
        events.append(("span", lane, name, start, end))

    def sent(self, channel: object, number: int, time: int) -> None:
        """Message `number` of `channel` left this worker."""
        events = self._events
        self.dropped += len(events) == events.maxlen
        events.append(("sent", channel, number, time))

    def received(self, channel: object, number: int, time: int) -> None:
        """Message `number` of `channel` was received, so that this worker could use it."""
        events = self._events
        self.dropped += len(events) == events.maxlen
        events.append(("received", channel, number, time))

    def count(self, name: object, time: int, value: float) -> None:
        """The counter `name` has this value from `time` on."""
        events = self._events
        self.dropped += len(events) == events.maxlen
        events.append(("count", name, time, value))

    @property
    def spans(self) -> list[Span]:
        """The spans in the order they were recorded."""
        shift = self.offset
        spans = self._of("span")
        return [Span(str(lane), str(name), start + shift, end + shift) for lane, name, start, end in spans]

    @property
    def sends(self) -> list[Mark]:
        """The messages that were sent, in the order they were recorded."""
        return [Mark(str(channel), number, time + self.offset) for channel, number, time in self._of("sent")]

    @property
    def receipts(self) -> list[Mark]:
        """The messages that were received, in the order they were recorded."""
        return [Mark(str(channel), number, time + self.offset) for channel, number, time in self._of("received")]

    @property
    def counts(self) -> list[Count]:
        """The values of counters, in the order they were recorded."""
        return [Count(str(name), time + self.offset, value) for name, time, value in self._of("count")]

    def _of(self, kind: str) -> Iterator[tuple[Any, ...]]:
        return (event[1:] for event in list(self._events) if event[0] == kind)  # a copy, as another thread may append

    def write(self, folder: Path) -> Path:
        """Write trace-worker-N.jsonl, a header line and one line for each event, and return its path."""
        header = {
            "stretto-trace": FORMAT,
            "worker": self.worker,
            "name": self.name,
            "host": self.host,
            "process": self.process,
            "offset": self.offset,
            "dropped": self.dropped,
        }
        path = folder / FILES.replace("*", str(self.worker))
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n")
            encode = json.JSONEncoder(default=str, separators=(",", ":")).encode
            file.writelines(encode(with_text(event)) + "\n" for event in list(self._events))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; an incomplete last line is left out. Raises UsageError for any other file."""
        text = read_text(path)
        header = read_json(path, text.partition("\n")[0], 1)
        if not isinstance(header, dict) or header.get("stretto-trace") != FORMAT:
            raise UsageError(f"{path} is not a trace of this version of Stretto (format {FORMAT})")
        with naming(f"{path}, line 1"):
            check_values("header", header, HEADER)
            _ = [header[key] for key in HEADER]
        events = list(lines(text.splitlines(keepends=True)[1:], path))
        recording = cls(header["worker"], name=header["name"], offset=header["offset"], limit=max(LIMIT, len(events)))
        recording.host, recording.process, recording.dropped = header["host"], header["process"], header["dropped"]
        recording._events.extend(map(tuple, events))
        return recording


def with_text(event: tuple[Any, ...]) -> tuple[Any, ...]:
    """An event with its names as text, as JSON would turn a name that is a tuple into a list."""
    return tuple([part if isinstance(part, int | float) else str(part) for part in event])


def lines(file: Iterable[str], path: Path) -> Iterator[Any]:
    """Yield the events of a file after its header; an incomplete last line is left out."""
    for number, line in enumerate(file, start=2):
        if not line.endswith("\n"):
            return  # its writer was killed, or the disk was full
        event = read_json(path, line, number)
        if not is_event(event):
            raise UsageError(f"{path}, line {number} is no event of a trace: {shown(event)}")
        yield event


def is_event(event: Any) -> bool:
    """Whether a value is an event as `Recording.write` writes it."""
    kinds = EVENTS.get(event[0]) if isinstance(event, list) and event and isinstance(event[0], str) else None
    return (
        kinds is not None
        and len(event) == len(kinds) + 1
        and all(
            type(part) in kind and (type(part) is not int or -MOST < part < MOST)
            for part, kind in zip(event[1:], kinds, strict=True)
        )
    )


def read_recordings(folder: Path) -> list[Recording]:
    """The recordings of all workers in a run's folder, by worker; empty if the run was not traced."""
    return sorted((Recording.read(path) for path in folder.glob(FILES)), key=lambda recording: recording.worker)


def channel(edge: Edge) -> str:
    """The channel of a message: kind of value, sending and receiving stage. The message's number is its micro-batch."""
    return f"{edge.value} {edge.source.stage}>{edge.stage}"


def worker_name(worker: int, schedule: Schedule) -> str:
    """The number of a worker and its stages, e.g. `worker 1: stages 2, 3`."""
    stages = [str(stage) for stage, owner in sorted(schedule.worker_of.items()) if owner == worker]
    return f"worker {worker}: stage{'s' * (len(stages) > 1)} {', '.join(stages)}"


MEASURED, SIMULATED = "measured", "simulated"
MICROBATCH = re.compile(r"\d+$")  # at the end of the name of an action or a message


def overlay(measured: Sequence[Recording], simulated: Sequence[Recording]) -> list[Recording]:
    """Recordings of both runs for `perfetto.write`, worker by worker, the measured one first.

    The simulated times are shifted so that both runs' first computations start together. Channels get different names,
    so that no message leads from one run to the other.
    """
    start, simulated_start = first_start(measured), first_start(simulated)
    both = [renamed(recording, MEASURED, 2 * recording.worker, 0) for recording in measured]
    shift = start - simulated_start
    both += [renamed(recording, SIMULATED, 2 * recording.worker + 1, shift) for recording in simulated]
    return sorted(both, key=lambda recording: recording.worker)


def between(recordings: Sequence[Recording], start: int, end: int, later: int = 0) -> list[Recording]:
    """Copies of recordings with the events in [`start`, `end`) ns only, and `later` added to micro-batch numbers."""
    copies = []
    for recording in recordings:
        copy = recording.blank()
        for lane, name, begin, until in recording.spans:
            if start <= begin < end:
                copy.span(lane, MICROBATCH.sub(lambda number: str(int(number[0]) + later), name), begin, until)
        for marks, mark in ((recording.sends, copy.sent), (recording.receipts, copy.received)):
            for channel, number, time in marks:
                if start <= time < end:
                    mark(channel, number + later, time)
        for count in recording.counts:
            if start <= count.time < end:
                copy.count(*count)
        copies.append(copy)
    return copies


def first_start(recordings: Sequence[Recording]) -> int:
    """The start of the first computation of any worker, in ns; 0 without one."""
    spans = (span for recording in recordings for span in recording.spans)
    return min((span.start for span in spans if span.lane == "compute"), default=0)


def renamed(recording: Recording, group: str, worker: int, shift: int) -> Recording:
    """A copy with another worker number, `group` in its name and channels, and `shift` ns added to its times."""
    spans, sends, receipts, counts = recording.spans, recording.sends, recording.receipts, recording.counts
    copy = recording.blank(worker, name=f"{group}, {recording.name}", offset=shift)
    for span in spans:
        copy.span(*span)
    for channel, number, time in sends:
        copy.sent(f"{group} {channel}", number, time)
    for channel, number, time in receipts:
        copy.received(f"{group} {channel}", number, time)
    for count in counts:
        copy.count(*count)
    return copy


PAUSE = "pause"  # the lane
Interval = tuple[int, int]


def pauses(recordings: Sequence[Recording]) -> list[Interval]:
    """The times (ns) in which all workers pause, in order. One that pauses first waits there for the others."""
    changes = []
    for recording in recordings:
        for start, end in united([(span.start, span.end) for span in recording.spans if span.lane == PAUSE]):
            changes += [(start, 1), (end, -1)]
    found, paused, since = [], 0, 0
    for time, change in sorted(changes):
        if paused == len(recordings) and time > since:
            found.append((since, time))
        paused, since = paused + change, time
    return found


def united(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals in order, those that overlap or touch made one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without_pauses(recordings: Sequence[Recording]) -> list[Recording]:
    """Copies of recordings whose clock stands still while all workers pause."""
    cut = pauses(recordings)
    starts = [start for start, _ in cut]
    before = [0]
    for start, end in cut:
        before.append(before[-1] + end - start)

    def training_time(time: int) -> int:
        at = bisect_right(starts, time)
        return time - before[at] if not at or time >= cut[at - 1][1] else starts[at - 1] - before[at - 1]

    return [on_clock(recording, training_time) for recording in recordings] if cut else list(recordings)


def on_clock(recording: Recording, clock: Callable[[int], int]) -> Recording:
    """A copy of a recording, without pauses, whose times are those of another clock."""
    copy = recording.blank()
    for lane, name, start, end in recording.spans:
        if lane != PAUSE:
            copy.span(lane, name, clock(start), clock(end))
    for channel, number, time in recording.sends:
        copy.sent(channel, number, clock(time))
    for channel, number, time in recording.receipts:
        copy.received(channel, number, clock(time))
    for name, time, value in recording.counts:
        copy.count(name, clock(time), value)
    return copy
