"""A measured and a simulated run in one trace, each simulated worker below the measured one."""

import re
from collections.abc import Sequence

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
