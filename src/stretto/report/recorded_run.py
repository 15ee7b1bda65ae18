"""A traced run as the report takes it: its turns, which of them are steady, how long steps and actions took."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from stretto.schedule import Action, Rules, Schedule
from stretto.tracing import Recording
from stretto.tracing.operation_spans import OPERATION, PROFILED, by_action, outermost
from stretto.tracing.pauses import without_pauses
from stretto.tracing.run_phases import EVERY_TURN, Stretch, action_of, stretches

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
        return stretches(self.training, self.schedule, self.among)

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
