"""A few turns of a traced run, and as many turns simulated with the durations that were measured.

The two differ by what the simulation leaves out: the time of messages, and delays in waking up and starting workers.
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
MOST_ACTIONS = 18  # of a worker that a chart has room for
ACTION_NAME = re.compile(r"(\d+)([A-Z])(\d+)")


class Bar(NamedTuple):
    """A worker is busy with an action, or waits for one; `start` and `end` in seconds from the start of the window."""

    worker: int
    kind: str  # of the action, or "wait"
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TurnWindow:
    """The actions and waits of all workers in a few turns."""

    bars: tuple[Bar, ...]
    seconds: float
    workers: int

    @property
    def busy(self) -> float:
        """The share of all workers' time in which they compute."""
        computing = sum(bar.end - bar.start for bar in self.bars if bar.kind != WAIT)
        return computing / (self.seconds * self.workers)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The recordings of a run, one for each worker, and the schedule that it followed in the turns `among`.

    A method's synchronous phases, outside these turns, have another schedule.
    """

    run: str
    method: str
    recordings: Sequence[Recording]
    schedule: Schedule
    rules: Rules
    among: range = range(sys.maxsize)

    @property
    def steady(self) -> range:
        """The turns with a full pipeline."""
        return self.among[self.schedule.drain + 1 :]

    @property
    def emulated(self) -> bool:
        """Whether all workers shared one process, on one device."""
        return len({(recording.host, recording.process) for recording in self.recordings}) == 1 < len(self.recordings)


@dataclass(frozen=True)
class Timelines:
    """The same number of turns with a full pipeline, measured and simulated."""

    run: str
    method: str
    turns: int
    measured: TurnWindow
    simulated: TurnWindow
    period: float  # seconds a turn takes in the steady state of the simulation
    emulated: bool  # all workers in one process, on one device


def timelines(recorded: RecordedRun) -> Timelines | None:
    """Choose turns of typical length and simulate as many; None if the recordings have too few with a full pipeline."""
    from stretto.simulate import (
        period,
        simulate,  # numpy takes a while
    )
    from stretto.simulate.timeline_recordings import recordings as simulated_recordings

    schedule, rules = recorded.schedule, recorded.rules
    turns = max(2, MOST_ACTIONS // max(map(len, schedule.body)))
    measured = typical_window(recorded.recordings, schedule, recorded.steady, turns)
    if measured is None:
        return None
    durations = mean_durations(recorded.recordings, schedule, recorded.steady)
    full = schedule.drain + 1
    settled = 2 * full
    timeline = simulate(schedule, rules, settled + turns + full, durations)
    simulated = typical_window(
        simulated_recordings(timeline, rules, unit=1), schedule, range(settled, sys.maxsize), turns
    )
    assert simulated is not None, "the simulation has more turns than are shown"
    return Timelines(
        run=recorded.run,
        method=recorded.method,
        turns=turns,
        measured=measured,
        simulated=simulated,
        period=period(schedule, rules, durations) / 1e9,
        emulated=recorded.emulated,
    )


def action_of(span: Span) -> Action | None:
    """The action that a span is about; None for a span that is no computation."""
    name = ACTION_NAME.fullmatch(span.name) if span.lane == "compute" else None
    return None if name is None else Action(name[2], int(name[1]), int(name[3]))


def mean_durations(recordings: Sequence[Recording], schedule: Schedule, among: range) -> Callable[[Action], float]:
    """A function that gives the mean nanoseconds of actions of its argument's kind and stage in the turns `among`."""
    times: dict[tuple[str, int], list[int]] = {}
    for recording in recordings:
        for span in recording.spans:
            action = action_of(span)
            if action is not None and action.microbatch // schedule.per_turn in among:
                times.setdefault((action.kind, action.stage), []).append(span.end - span.start)
    means = {key: round(fmean(nanoseconds)) for key, nanoseconds in times.items()}
    return lambda action: means.get((action.kind, action.stage), 0)


def typical_window(recordings: Sequence[Recording], schedule: Schedule, among: range, turns: int) -> TurnWindow | None:
    """Of all windows of `turns` consecutive turns the one of median length, since a long one may hold a pause.

    A turn begins when the first worker begins it. None if the turns `among` have no such window.
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
    """{turn: nanoseconds at which the worker began its first action}."""
    kind, stage, offset = schedule.body[recording.worker][0]
    starts = {}
    for span in recording.spans:
        action = action_of(span)
        if action is not None and action[:2] == (kind, stage):
            turn, left = divmod(action.microbatch - offset, schedule.per_turn)
            if not left:
                starts[turn] = span.start
    return starts


def window(recordings: Sequence[Recording], start: int, end: int) -> TurnWindow:
    """The bars between two times in nanoseconds; those that begin earlier or end later are cut off."""
    bars = []
    for recording in recordings:
        for span in recording.spans:
            action = action_of(span)
            kind = WAIT if span.lane == WAIT else None if action is None else action.kind
            begins, ends = max(span.start, start), min(span.end, end)
            if kind is not None and begins < ends:
                bars.append(Bar(recording.worker, kind, span.name, (begins - start) / 1e9, (ends - start) / 1e9))
    return TurnWindow(tuple(bars), (end - start) / 1e9, len(recordings))
