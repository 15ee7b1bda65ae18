"""Changed copies of recordings: of a part of a run, without its pauses, a measured run beside a simulated one.

Pauses of training, as for an evaluation or a checkpoint, are cut out, so that they count for no step.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence

from stretto.tracing.recording import Recording

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
