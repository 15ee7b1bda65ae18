"""A traced run beside its simulation: the trace of both, and how far they are apart in each phase."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from stretto.cost import Cluster
from stretto.errors import UsageError
from stretto.report.recorded_run import Excerpt, RecordedRun, excerpts
from stretto.study.predicted_runs import predict, recorded_run, recordings_of
from stretto.study.prepare import prepare_trial
from stretto.study.single_run import traced
from stretto.study.store import RUN
from stretto.study.study import study_of_run
from stretto.tracing import Recording
from stretto.tracing.copies import MEASURED, SIMULATED, first_start, overlay, pauses
from stretto.tracing.run_phases import STEADY, RunPhase, Stretch

MOST_TURNS = 200
WHOLE_RUN = "whole run"
UNUSUAL = 3.0  # times the median of its steps: longer ones, in which other programs had the processor, do not count


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """How long a phase of the overlay takes, in seconds: measured and simulated. None: it has no such phase."""

    phase: str
    measured: float | None
    simulated: float | None


@dataclass(frozen=True, kw_only=True)
class Overlaid:
    """How long a step takes in an overlay, in seconds, from step `first` on: means of `steps` steps of `phase`.

    That is the steady state or, of a run without one, the whole run, ramp and drain included. `shown` are the first and
    the last step in the trace. `pauses` (evaluations, checkpoints) were cut out of the measured run.
    """

    method: str
    source: str
    phase: str
    first: int
    steps: int
    measured: float
    simulated: float
    emulated: bool
    ramp_steps: int
    shown: tuple[int, int]
    phases: tuple[PhaseSeconds, ...]
    pauses: int
    steady_steps: int  # of the run, MIN_STEPS at least for a figure


def overlaid(
    folder: Path, cluster: Cluster | None = None, trusted: Collection[str] = ()
) -> tuple[list[Recording], Mapping[str, Sequence[RunPhase]], Overlaid]:
    """Recordings of a traced run and of the same turns simulated, for one trace; their phases; their figures.

    Functions that the run's settings name are called: they have to be among the `trusted` ones.
    Raises UsageError for a run without a trace, or one in which nothing of its schedule was recorded.
    """
    if not (folder / RUN).is_file():
        raise UsageError(f"no run in {folder}: name a folder that stretto train --trace has written")
    (task,) = study_of_run(folder, trusted).tasks
    run = task.settings
    traced(folder)
    prepared = prepare_trial(run)
    recorded = recorded_run(prepared, recordings_of(folder, run))
    stretch = recorded.longest
    if stretch is None:
        raise UsageError(f"the trace of the run in {folder} has no step of {run.method} in it: train longer")
    prediction = predict(prepared, recorded, cluster)
    pair = excerpts(
        recorded, stretch, shown(recorded, stretch), prediction.durations,
        network=prediction.network, sizes=prediction.sizes,
    )  # fmt: skip
    return both(*pair), phases_of(*pair), compare(recorded, stretch, pair, prediction.source)


def shown(recorded: RecordedRun, stretch: Stretch) -> range:
    """The turns of an overlay: from the ramp on or, where that was dropped, from the steady state on."""
    turns = stretch.turns
    if not stretch.whole and len(stretch.steady) > 1:
        turns = stretch.steady[:-1]
    return turns[:MOST_TURNS]


def both(measured: Excerpt, simulated: Excerpt) -> list[Recording]:
    """The recordings of the overlay."""
    return overlay(measured.events, simulated.events)


def phases_of(measured: Excerpt, simulated: Excerpt) -> dict[str, list[RunPhase]]:
    """The phases of both runs, for tracks of their own, on the clock of the overlay."""
    shift = first_start(measured.events) - first_start(simulated.events)
    later = [phase._replace(start=phase.start + shift, end=phase.end + shift) for phase in simulated.phases]
    return {f"phases, {MEASURED}": list(measured.phases), f"phases, {SIMULATED}": later}


def compare(recorded: RecordedRun, stretch: Stretch, pair: tuple[Excerpt, Excerpt], source: str) -> Overlaid:
    """The seconds of a step and of each phase, of the turns in a pair of excerpts."""
    measured, simulated = pair
    turns = shown(recorded, stretch)
    steady = [turn for turn in turns if {turn, turn + 1} <= recorded.steady and turn + 1 in turns]
    if recorded.is_steady and steady:
        first, count, phase = steady[0], len(steady), STEADY
        steps = [typical([each.steps(turns)[turn + 1] for turn in steady]) for each in pair]
    else:
        first, count, phase = turns.start, len(turns), WHOLE_RUN
        steps = [each.seconds / count for each in pair]
    names = dict.fromkeys(part.name for each in pair for part in each.phases)
    return Overlaid(
        method=recorded.method, source=source, phase=phase, first=first + 1, steps=count, measured=steps[0],
        simulated=steps[1], emulated=recorded.emulated, ramp_steps=recorded.schedule.drain + 1,
        shown=(turns.start + 1, turns.stop), pauses=pauses_within(recorded), steady_steps=len(steady),
        phases=tuple(
            PhaseSeconds(phase=name, measured=measured.in_phase(name) or None,
                         simulated=simulated.in_phase(name) or None)
            for name in names
        ),
    )  # fmt: skip


def pauses_within(recorded: RecordedRun) -> int:
    """How many pauses a run had before its last action."""
    last = max(span.end for each in recorded.recordings for span in each.spans if span.lane == "compute")
    return sum(start < last for start, _ in pauses(recorded.recordings))


def typical(seconds: Sequence[float]) -> float:
    """The mean of steps without unusually long ones; a median would take one of several that take turns."""
    most = UNUSUAL * median(seconds)
    return fmean([step for step in seconds if step <= most])
