"""Pauses of training in recordings, as for an evaluation or a checkpoint: cut out, so that they count for no step."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from stretto.tracing.recording import Recording

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
