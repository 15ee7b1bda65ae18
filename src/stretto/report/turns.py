"""Timelines of a traced run: turns of it, and the same turns simulated with the durations that were measured.

The two differ by what the simulation leaves out: the time of messages, and delays in waking up and starting workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.report.excerpt import Durations, excerpts
from stretto.report.recorded_run import RecordedRun, longest_operations, mean_durations, own_durations, typical_turns
from stretto.tracing import Recording
from stretto.tracing.run_phases import RunPhase, Stretch, action_of

WAIT = "wait"
MOST_ACTIONS = 18  # of a worker in the steady state that a chart has room for
MOST_OPERATIONS = 5  # that the hint of an action names
MOST_BARS = 2500  # of a chart of a ramp or a drain


class Bar(NamedTuple):
    """A worker is busy with an action, or waits for one; `start` and `end` in seconds from the start of the window."""

    worker: int
    kind: str  # of the action, or "wait"
    name: str
    start: float
    end: float


class Band(NamedTuple):
    """A phase of the run, in seconds from the start of the window."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TurnWindow:
    """The actions and waits of all workers in a few turns, and the phases of the run that these belong to."""

    bars: tuple[Bar, ...]
    seconds: float
    workers: int
    bands: tuple[Band, ...] = ()

    @property
    def busy(self) -> float:
        """The share of all workers' time in which they compute."""
        computing = sum(bar.end - bar.start for bar in self.bars if bar.kind != WAIT)
        return computing / (self.seconds * self.workers)


@dataclass(frozen=True)
class TimelinePart:
    """Turns of a run that have a chart of their own: `title` says which they are."""

    title: str
    measured: TurnWindow
    simulated: TurnWindow


@dataclass(frozen=True)
class Timelines:
    """The same turns measured and simulated: of the steady state, or of the whole run where it has none.

    `parts` are the ramp and the drain of a run with a steady state.
    """

    run: str
    method: str
    turns: int
    measured: TurnWindow
    simulated: TurnWindow
    period: float | None  # seconds a turn takes in the steady state of the simulation; None without a steady state
    emulated: bool  # all workers in one process, on one device
    parts: tuple[TimelinePart, ...] = ()
    operations: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)  # seconds in an action
    steps: str = ""  # which steps the charts of a run without a steady state show, and how many it takes to be full


def timelines(recorded: RecordedRun) -> Timelines | None:
    """Choose turns of typical length and simulate as many; of a run without a steady state take all of them.

    None where nothing of the schedule was recorded.
    """
    stretch = recorded.longest
    if stretch is None:
        return None
    own = own_durations(recorded.training, recorded.schedule)
    if not recorded.is_steady:
        return whole_run(recorded, stretch, own)
    from stretto.simulate import period

    schedule, rules = recorded.schedule, recorded.rules
    durations = mean_durations(recorded.training, schedule, recorded.steady)
    turns, chosen = max(2, MOST_ACTIONS // max(map(len, schedule.body))), None
    while chosen is None:  # a short run has fewer
        chosen = typical_turns(recorded.training, schedule, recorded.steady, turns)
        turns -= chosen is None
    around = next(each for each in recorded.stretches if chosen.start in each.turns)
    measured, simulated = windows(recorded, around, chosen, durations)
    return Timelines(
        run=recorded.run,
        method=recorded.method,
        turns=turns,
        measured=measured,
        simulated=simulated,
        period=period(schedule, rules, durations) / 1e9,
        emulated=recorded.emulated,
        operations=longest_operations(recorded.training, MOST_OPERATIONS),
        parts=tuple(
            TimelinePart(title, *windows(recorded, stretch, part, own))
            for title, part in ends_of(recorded, stretch, turns).items()
        ),
    )


def whole_run(recorded: RecordedRun, stretch: Stretch, durations: Durations) -> Timelines:
    """All turns of a run that has no steady state, as far as a chart has room for them."""
    shown = stretch.turns[: room(recorded)]
    measured, simulated = windows(recorded, stretch, shown, durations)
    full = recorded.schedule.drain + 1
    return Timelines(
        run=recorded.run, method=recorded.method, turns=len(shown), measured=measured, simulated=simulated,
        period=None, emulated=recorded.emulated,
        operations=longest_operations(recorded.training, MOST_OPERATIONS),
        steps=f"{named(shown)} of {len(stretch.turns)}; the ramp takes {full} step{'s' * (full > 1)}",
    )  # fmt: skip


def ends_of(recorded: RecordedRun, stretch: Stretch, turns: int) -> dict[str, range]:
    """The turns of a stretch's ramp and drain, by what a chart of them is called, with some steady turns each."""
    full, most = recorded.schedule.drain + 1, room(recorded)
    beginning, end = min(most, full + turns // 2), min(most, turns // 2 + 1)
    all_turns = stretch.turns
    if stretch.whole and len(all_turns) <= min(most, beginning + end):
        return {f"From ramp to drain: {named(all_turns)}": all_turns}
    first, last = all_turns[:beginning], all_turns[-end:]
    ramp = {f"Ramp: {named(first)}": first} if stretch.whole else {}  # else its events were dropped
    return {**ramp, f"Drain: {named(last)}": last}


def room(recorded: RecordedRun) -> int:
    """How many turns of all workers a chart has room for."""
    return max(1, MOST_BARS // sum(map(len, recorded.schedule.body)))


def named(turns: range) -> str:
    """The steps of turns, in words."""
    return f"step {turns.stop}" if len(turns) == 1 else f"steps {turns.start + 1} to {turns.stop}"


def windows(
    recorded: RecordedRun, stretch: Stretch, turns: range, durations: Durations
) -> tuple[TurnWindow, TurnWindow]:
    """Turns of a stretch as recorded, and simulated."""
    pair: Sequence[TurnWindow] = [
        window(each.recordings, each.start, each.end, each.phases)
        for each in excerpts(recorded, stretch, turns, durations)
    ]
    measured, simulated = pair
    return measured, simulated


def window(recordings: Sequence[Recording], start: int, end: int, phases: Sequence[RunPhase] = ()) -> TurnWindow:
    """The bars between two times in nanoseconds; those that begin earlier or end later are cut off."""
    bars = []
    for recording in recordings:
        for span in recording.spans:
            action = action_of(span)
            kind = WAIT if span.lane == WAIT else None if action is None else action.kind
            begins, ends = max(span.start, start), min(span.end, end)
            if kind is not None and begins < ends:
                bars.append(Bar(recording.worker, kind, span.name, (begins - start) / 1e9, (ends - start) / 1e9))
    bands = [Band(phase.name, (phase.start - start) / 1e9, (phase.end - start) / 1e9) for phase in phases]
    return TurnWindow(tuple(bars), (end - start) / 1e9, len(recordings), tuple(bands))
