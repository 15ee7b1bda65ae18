"""A measured and a simulated run in one trace, each with processes of its own, one above the other."""

from collections.abc import Sequence

from stretto.tracing.recording import LIMIT, Recording

MEASURED, SIMULATED = "measured", "simulated"


def overlay(measured: Sequence[Recording], simulated: Sequence[Recording]) -> list[Recording]:
    """Both, for `perfetto.write`: worker by worker, the measured one first, both beginning at the same time.

    Each begins with the first span that any of its workers computed. Messages lead from measured workers to measured
    ones, and from simulated to simulated: their channels are told apart by name.
    """
    start, simulated_start = beginning(measured), beginning(simulated)
    both = [renamed(each, MEASURED, 2 * each.worker, 0) for each in measured]
    both += [renamed(each, SIMULATED, 2 * each.worker + 1, start - simulated_start) for each in simulated]
    return sorted(both, key=lambda recording: recording.worker)


def beginning(recordings: Sequence[Recording]) -> int:
    """When the first worker began to compute: 0 where none did."""
    return min((span.start for each in recordings for span in each.spans if span.lane == "compute"), default=0)


def renamed(recording: Recording, group: str, worker: int, ahead: int) -> Recording:
    """A copy with another number, a name that says which group it is of, and its times moved."""
    spans, sends, receipts, counts = recording.spans, recording.sends, recording.receipts, recording.counts
    limit = max(LIMIT, len(spans) + len(sends) + len(receipts) + len(counts))
    copy = Recording(worker, name=f"{group}, {recording.name}", offset=ahead, limit=limit)
    copy.host, copy.process, copy.dropped = recording.host, recording.process, recording.dropped
    for span in spans:
        copy.span(*span)
    for channel, number, time in sends:
        copy.sent(f"{group} {channel}", number, time)
    for channel, number, time in receipts:
        copy.received(f"{group} {channel}", number, time)
    for count in counts:
        copy.count(*count)
    return copy
