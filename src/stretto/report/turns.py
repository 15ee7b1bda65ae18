"""A few turns of a traced run, beside as many turns simulated with the durations that were measured.

What differs between the two is what a simulation leaves out: waiting for messages and wake-ups, and whatever keeps a
worker from starting in time.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from stretto.schedule import Action, Rules, Schedule
from stretto.tracing import Recording, Span

WAIT = "wait"
CELLS = 18  # actions of a worker that a chart has room for
WRITTEN = re.compile(r"(\d+)([A-Z])(\d+)")


class Bar(NamedTuple):
    """A worker is busy with an action, or waits for one: seconds from the start of the window."""

    worker: int
    kind: str  # an action's, or "wait"
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Window:
    """What the workers do in a few turns."""

    bars: tuple[Bar, ...]
    seconds: float
    workers: int

    @property
    def busy(self) -> float:
        """The share of all workers' time in which they compute."""
        computing = sum(bar.end - bar.start for bar in self.bars if bar.kind != WAIT)
        return computing / (self.seconds * self.workers)


@dataclass(frozen=True)
class Timelines:
    """The same number of turns of a full pipeline, as they were and as they would be on paper."""

    run: str
    method: str
    turns: int
    measured: Window
    simulated: Window
    period: float  # seconds a turn takes in the steady state of the simulation
    emulated: bool  # all workers in one process, on one device


def timelines(
    run: str,
    method: str,
    recordings: Sequence[Recording],
    schedule: Schedule,
    rules: Rules,
    *,
    among: range = range(sys.maxsize),
) -> Timelines | None:
    """Choose the turns and simulate them; None where the recordings have no stretch of a full pipeline.

    Only the turns `among` these follow the schedule: a method's synchronous phases have another.
    """
    from stretto.simulate import (
        period,
        simulate,  # numpy takes a while
    )
    from stretto.simulate.recordings import recordings as simulated_recordings

    turns = max(2, CELLS // max(map(len, schedule.body)))
    full = schedule.drain + 1
    steady = among[full:]
    measured = typical_window(recordings, schedule, steady, turns)
    if measured is None:
        return None
    durations = mean_durations(recordings, schedule, steady)
    settled = 2 * full
    timeline = simulate(schedule, rules, settled + turns + full, durations)
    simulated = typical_window(
        simulated_recordings(timeline, rules, unit=1), schedule, range(settled, sys.maxsize), turns
    )
    assert simulated is not None, "the simulation has more turns than are shown"
    return Timelines(
        run=run,
        method=method,
        turns=turns,
        measured=measured,
        simulated=simulated,
        period=period(schedule, rules, durations) / 1e9,
        emulated=len({(recording.host, recording.process) for recording in recordings}) == 1 < len(recordings),
    )


def action_of(span: Span) -> Action | None:
    """The action that a worker computed; None for anything else."""
    written = WRITTEN.fullmatch(span.name) if span.lane == "compute" else None
    return None if written is None else Action(written[2], int(written[1]), int(written[3]))


def mean_durations(recordings: Sequence[Recording], schedule: Schedule, among: range) -> Callable[[Action], float]:
    """The mean time, in whole nanoseconds, of each kind of action on each stage, of what entered in these turns."""
    seen: dict[tuple[str, int], list[int]] = {}
    for recording in recordings:
        for span in recording.spans:
            action = action_of(span)
            if action is not None and action.microbatch // schedule.per_turn in among:
                seen.setdefault((action.kind, action.stage), []).append(span.end - span.start)
    means = {key: round(fmean(times)) for key, times in seen.items()}
    return lambda action: means.get((action.kind, action.stage), 0)


def typical_window(recordings: Sequence[Recording], schedule: Schedule, among: range, turns: int) -> Window | None:
    """Of all stretches of so many turns, `among` these, the one of median length: others may hold a pause.

    A turn begins when the first worker begins it. None where there is no such stretch.
    """
    starts = turn_starts(recordings[0], schedule)
    lengths = sorted(
        (starts[n + turns] - start, n)
        for n, start in starts.items()
        if n in among and n + turns in among and n + turns in starts
    )
    if not lengths:
        return None
    start = starts[lengths[len(lengths) // 2][1]]
    return window(recordings, start, start + lengths[len(lengths) // 2][0])


def turn_starts(recording: Recording, schedule: Schedule) -> dict[int, int]:
    """When a worker began each turn, in nanoseconds, by the first action of its list."""
    kind, stage, offset = schedule.body[recording.worker][0]
    starts = {}
    for span in recording.spans:
        action = action_of(span)
        if action is not None and action[:2] == (kind, stage):
            turn, left = divmod(action.microbatch - offset, schedule.per_turn)
            if not left:
                starts[turn] = span.start
    return starts


def window(recordings: Sequence[Recording], start: int, end: int) -> Window:
    """What lies between two times, cut off at both."""
    bars = []
    for recording in recordings:
        for span in recording.spans:
            action = action_of(span)
            kind = WAIT if span.lane == WAIT else None if action is None else action.kind
            begins, ends = max(span.start, start), min(span.end, end)
            if kind is not None and begins < ends:
                bars.append(Bar(recording.worker, kind, span.name, (begins - start) / 1e9, (ends - start) / 1e9))
    return Window(tuple(bars), (end - start) / 1e9, len(recordings))
