"""A traced run as the report takes it: its turns, which of them are steady, how long steps and actions took.

Timelines have some turns of it, and as many simulated with the durations that were measured. The two differ by what the
simulation leaves out: the time of messages, and delays in waking up and starting workers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from stretto.schedule import Action, Rules, Schedule
from stretto.tracing import Recording
from stretto.tracing.operation_spans import OPERATION, PROFILED, by_action, outermost
from stretto.tracing.recording import between, without_pauses
from stretto.tracing.run_phases import (
    EVERY_TURN,
    RunPhase,
    Share,
    Stretch,
    action_of,
    by_step,
    drains_each_turn,
    shares_of,
    stretches,
)

if TYPE_CHECKING:
    from stretto.simulate import Network
    from stretto.simulate.network import Sizes

MIN_STEPS = 3  # in the steady state: a figure of fewer is none of it


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
    among: range = EVERY_TURN

    @cached_property
    def training(self) -> Sequence[Recording]:
        """The recordings without the times in which all workers paused: evaluations, checkpoints."""
        return without_pauses(self.recordings)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The turns between one drain and the next."""
        return stretches(self.training, self.schedule, self.rules, self.among)

    @property
    def has_phases_in_steps(self) -> bool:
        """Whether each step has a ramp and a drain of its own."""
        return drains_each_turn(self.schedule, self.rules)

    @property
    def longest(self) -> Stretch | None:
        """The first of the stretches with most turns; None where nothing of the schedule was recorded."""
        return max(self.stretches, key=lambda stretch: len(stretch.turns), default=None)

    @cached_property
    def steady(self) -> frozenset[int]:
        """The turns with a full pipeline; without those under a profiler, where enough others are left."""
        steady = frozenset(turn for stretch in self.stretches for turn in stretch.steady)
        others = steady - profiled_turns(self.training, self.schedule)
        enough = self.training and len(steps_of(self.training[0], self.schedule, others)) >= MIN_STEPS
        return others if enough else steady

    @cached_property
    def is_steady(self) -> bool:
        """Whether it has MIN_STEPS steps in the steady state; a figure of fewer would be one of the ramp's end."""
        return len(steps_of(self.training[0], self.schedule, self.steady)) >= MIN_STEPS if self.training else False

    @property
    def emulated(self) -> bool:
        """Whether all workers shared one process, on one device."""
        return len({(recording.host, recording.process) for recording in self.recordings}) == 1 < len(self.recordings)


def steps_of(
    recording: Recording, schedule: Schedule, among: Collection[int], paused: Collection[int] = ()
) -> dict[int, float]:
    """{step: seconds from its start on the first worker to the start of the next}; steps count from 1.

    Both steps are `among` these turns, and the run did not pause after the first.
    """
    starts = turn_starts(recording, schedule)
    return {
        turn + 1: (starts[turn + 1] - start) / 1e9
        for turn, start in sorted(starts.items())
        if turn in among and turn + 1 in among and turn + 1 in starts and turn + 1 not in paused
    }


def longest_operations(recordings: Sequence[Recording], most: int) -> dict[tuple[str, int], dict[str, float]]:
    """{(kind, stage) of an action: {name of an operation: mean seconds in such an action}}, the `most` longest ones.

    Of the actions whose operations were recorded; those inside others are not counted twice.
    """
    seconds: dict[tuple[str, int], dict[str, float]] = {}
    actions: dict[tuple[str, int], int] = {}
    for recording in recordings:
        spans = [span for span in recording.spans if action_of(span) is not None]
        operations = [span for span in recording.spans if span.lane == OPERATION]
        for span, inside in zip(spans, by_action(spans, operations), strict=True):
            action = action_of(span)
            if action is None or not inside:
                continue
            key = action.kind, action.stage
            actions[key] = actions.get(key, 0) + 1
            sums = seconds.setdefault(key, {})
            for operation in outermost(inside):
                sums[operation.name] = sums.get(operation.name, 0.0) + (operation.end - operation.start) / 1e9
    return {
        key: {name: sums[name] / actions[key] for name in sorted(sums, key=lambda name: -sums[name])[:most]}
        for key, sums in seconds.items()
    }


def profiled_turns(recordings: Sequence[Recording], schedule: Schedule) -> set[int]:
    """The turns that the first worker began under a profiler."""
    profiled = [span for recording in recordings[:1] for span in recording.spans if span.lane == PROFILED]
    if not profiled:
        return set()
    starts = turn_starts(recordings[0], schedule)
    return {turn for turn, time in starts.items() if any(span.start <= time < span.end for span in profiled)}


def mean_durations(
    recordings: Sequence[Recording], schedule: Schedule, among: Collection[int]
) -> Callable[[Action], float]:
    """A function that gives the mean nanoseconds of actions of its argument's kind and stage in the turns `among`."""
    times: dict[tuple[str, int], list[int]] = {}
    for recording in recordings:
        for span in recording.spans:
            action = action_of(span)
            if action is not None and action.microbatch // schedule.per_turn in among:
                times.setdefault((action.kind, action.stage), []).append(span.end - span.start)
    means = {key: round(fmean(nanoseconds)) for key, nanoseconds in times.items()}
    return lambda action: means.get((action.kind, action.stage), 0)


def own_durations(recordings: Sequence[Recording], schedule: Schedule) -> Callable[[Action], float]:
    """A function that gives the nanoseconds that an action took; the mean of its kind and stage if it was not recorded.

    For runs without a steady state, whose first step is as long as torch and the caches need to warm up.
    """
    spans = [span for recording in recordings for span in recording.spans]
    took = {action: span.end - span.start for span in spans if (action := action_of(span)) is not None}
    mean = mean_durations(recordings, schedule, EVERY_TURN)
    return lambda action: took[action] if action in took else mean(action)


def typical_turns(
    recordings: Sequence[Recording], schedule: Schedule, among: Collection[int], turns: int
) -> range | None:
    """Of all windows of `turns` consecutive turns the one of median length, since a long one may hold a pause.

    A turn begins when the first worker begins it. None if the turns `among` have no such window.
    """
    starts = turn_starts(recordings[0], schedule)
    lengths = sorted(
        (starts[n + turns] - start, n)
        for n, start in starts.items()
        if n + turns in starts and all(turn in among for turn in range(n, n + turns + 1))
    )
    if not lengths:
        return None
    _, first = lengths[len(lengths) // 2]
    return range(first, first + turns)


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


Durations = Callable[[Action], float]


@dataclass(frozen=True)
class Excerpt:
    """Recordings, a part of them from `start` to `end` ns, its phases, and when turns began there."""

    recordings: Sequence[Recording]
    start: int
    end: int
    phases: tuple[RunPhase, ...]
    starts: dict[int, int]  # of each turn on the first worker, ns

    @property
    def events(self) -> list[Recording]:
        """Copies of the recordings with what began in this part, the marks at its very end included."""
        return between(self.recordings, self.start, self.end + 1)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return (self.end - self.start) / 1e9

    def in_phase(self, name: str) -> float:
        """The seconds that a phase takes; 0 without it."""
        return sum(phase.end - phase.start for phase in self.phases if phase.name == name) / 1e9

    def steps(self, turns: range) -> dict[int, float]:
        """{step, from 1: seconds to the start of the next one}; to the end of the excerpt after the last of its turns.

        The last step of a run has the drain in it.
        """
        ends = {turns.stop: self.end} | self.starts
        return {turn + 1: (ends[turn + 1] - ends[turn]) / 1e9 for turn in turns if {turn, turn + 1} <= ends.keys()}


def excerpts(
    recorded: RecordedRun,
    stretch: Stretch,
    turns: range,
    durations: Durations,
    *,
    network: "Network | None" = None,
    sizes: "Sizes | None" = None,
) -> tuple[Excerpt, Excerpt]:
    """Turns of a stretch as recorded, and as many simulated, under the same numbers.

    From the first turn of the stretch on both have the ramp, up to its last one the drain. Elsewhere the simulation
    has had twice the turns of a ramp before. `durations` gives the ns of an action by the number that it has in the
    recordings.
    """
    from stretto.simulate import simulate  # numpy takes a while
    from stretto.simulate.network import no_bytes
    from stretto.simulate.timeline import recordings as simulated_recordings

    schedule, full = recorded.schedule, recorded.schedule.drain + 1
    from_start, to_end = turns.start == stretch.turns.start, turns.stop == stretch.turns.stop
    before, after = (0 if from_start else 2 * full), (0 if to_end else full)
    later = (turns.start - before) * schedule.per_turn

    def shifted(action: Action) -> float:
        return durations(action._replace(microbatch=action.microbatch + later))

    timeline = simulate(
        schedule, recorded.rules, before + len(turns) + after, shifted, network=network, sizes=sizes or no_bytes
    )
    simulation = simulated_recordings(timeline, recorded.rules, unit=1)
    renumbered = between(simulation, 0, 2**63, later)
    (simulated,) = stretches(renumbered, schedule, recorded.rules)
    ends = from_start, to_end
    return (
        excerpt(recorded.training, stretch, turns, schedule, ends),
        excerpt(renumbered, simulated, turns, schedule, ends),
    )


def excerpt(
    recordings: Sequence[Recording], stretch: Stretch, turns: range, schedule: Schedule, ends: tuple[bool, bool]
) -> Excerpt:
    """Turns of a stretch; `ends` say whether the ramp before and the drain after them belong to it."""
    starts = turn_starts(recordings[0], schedule)
    start = stretch.start if ends[0] else starts[turns.start]
    end = stretch.end if ends[1] else starts[turns.stop]
    inside = [
        phase._replace(start=max(phase.start, start), end=min(phase.end, end))
        for phase in stretch.phases
        if phase.start < end and phase.end > start
    ]
    here = {turn: time for turn, time in starts.items() if turn in stretch.turns}
    return Excerpt(recordings, start, end, tuple(inside), here)


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

    `parts` are the ramp and the drain of a run with a steady state. Where each step has phases of its own, `shares` are
    what they take of a step, {phase: (measured, simulated)}.
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
    shares: Mapping[str, tuple[Share, Share]] = field(default_factory=dict)
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
    pair = excerpts(recorded, around, chosen, durations)
    measured, simulated = map(window_of, pair)
    return Timelines(
        run=recorded.run,
        method=recorded.method,
        turns=turns,
        measured=measured,
        simulated=simulated,
        period=period(schedule, rules, durations) / 1e9,
        shares=shares_in_steps(recorded, recorded.steady, pair[1].phases, chosen),
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
    pair = excerpts(recorded, stretch, shown, durations)
    measured, simulated = map(window_of, pair)
    full = recorded.schedule.drain + 1
    first = (
        "the first one is none of it"
        if recorded.has_phases_in_steps
        else f"the ramp takes {full} step{'s' * (full > 1)}"
    )
    return Timelines(
        run=recorded.run,
        method=recorded.method,
        turns=len(shown),
        measured=measured,
        simulated=simulated,
        period=None,
        emulated=recorded.emulated,
        operations=longest_operations(recorded.training, MOST_OPERATIONS),
        shares=shares_in_steps(recorded, shown, pair[1].phases, shown),
        steps=f"{named(shown)} of {len(stretch.turns)}; {first}",
    )


def ends_of(recorded: RecordedRun, stretch: Stretch, turns: int) -> dict[str, range]:
    """The turns of a stretch's ramp and drain, by what a chart of them is called, with some steady turns each."""
    full, most = recorded.schedule.drain + 1, room(recorded)
    beginning, end = min(most, full + turns // 2), min(most, turns // 2 + 1)
    all_turns = stretch.turns
    if recorded.has_phases_in_steps:  # every step has both
        first = all_turns[:beginning]
        return {f"From the start: {named(first)}": first} if stretch.whole else {}
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
    measured, simulated = excerpts(recorded, stretch, turns, durations)
    return window_of(measured), window_of(simulated)


def window_of(part: Excerpt) -> TurnWindow:
    """What a chart shows of an excerpt."""
    return window(part.recordings, part.start, part.end, part.phases)


def shares_in_steps(
    recorded: RecordedRun, measured: Collection[int], simulation: Sequence[RunPhase], simulated: Collection[int]
) -> dict[str, tuple[Share, Share]]:
    """What phases take of the `measured` turns and of the `simulated` ones; nothing where steps have none."""
    if not recorded.has_phases_in_steps:
        return {}
    phases = (phase for stretch in recorded.stretches for phase in stretch.phases)
    here, there = shares_of(by_step(phases, measured)), shares_of(by_step(simulation, simulated))
    return {name: (here[name], there[name]) for name in here if there}


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
