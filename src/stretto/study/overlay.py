"""A traced run beside its simulation: the trace of both, and how far they are apart in each phase."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from stretto.cost import Cluster
from stretto.errors import UsageError
from stretto.report.recorded_run import Excerpt, RecordedRun, excerpts
from stretto.report.units import duration, part
from stretto.study.predicted_runs import predict, recorded_run, recordings_of
from stretto.study.prepare import prepare_trial
from stretto.study.single_run import traced
from stretto.study.store import RUN
from stretto.study.study import study_of_run
from stretto.tracing import Recording
from stretto.tracing.recording import MEASURED, SIMULATED, first_start, overlay, pauses
from stretto.tracing.run_phases import STEADY, RunPhase, by_step, shares_of

MOST_TURNS = 200
WHOLE_RUN = "whole run"
UNUSUAL = 3.0  # times the median of its steps: longer ones, in which other programs had the processor, do not count


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """How long a phase of the overlay takes, in seconds: measured and simulated. None: it has no such phase.

    The sum over its steps where each has phases of its own.
    """

    phase: str
    measured: float | None
    simulated: float | None


@dataclass(frozen=True, kw_only=True)
class StepPhases:
    """How long the phases of one step take, {phase: seconds}, measured and simulated; without those that it lacks."""

    step: int
    measured: Mapping[str, float]
    simulated: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Overlaid:
    """How long a step takes in an overlay, in seconds, from step `first` on: means of `steps` steps of `phase`.

    That is the steady state or, of a run without one, the whole run, ramp and drain included. `shown` are the first and
    the last step in the trace. `pauses` (evaluations, checkpoints) were cut out of the measured run. `step_phases` are
    those of each step, where a minibatch is finished before the next one enters.
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
    step_phases: tuple[StepPhases, ...]
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
    # from the ramp on or, where that was dropped, from the steady state on
    is_ramp_dropped = not stretch.whole and len(stretch.steady) > 1
    turns = (stretch.steady[:-1] if is_ramp_dropped else stretch.turns)[:MOST_TURNS]
    pair = excerpts(recorded, stretch, turns, prediction.durations, network=prediction.network, sizes=prediction.sizes)
    events = overlay(*(each.events for each in pair))
    return events, phases_of(*pair), compare(recorded, turns, pair, prediction.source)


def phases_of(measured: Excerpt, simulated: Excerpt) -> dict[str, list[RunPhase]]:
    """The phases of both runs, for tracks of their own, on the clock of the overlay."""
    shift = first_start(measured.events) - first_start(simulated.events)
    later = [phase._replace(start=phase.start + shift, end=phase.end + shift) for phase in simulated.phases]
    return {f"phases, {MEASURED}": list(measured.phases), f"phases, {SIMULATED}": later}


def compare(recorded: RecordedRun, turns: range, pair: tuple[Excerpt, Excerpt], source: str) -> Overlaid:
    """The seconds of a step and of each phase, of the turns in a pair of excerpts."""
    measured, simulated = pair
    steady = [turn for turn in turns if {turn, turn + 1} <= recorded.steady and turn + 1 in turns]
    if recorded.is_steady and steady:
        first, count, phase = steady[0], len(steady), STEADY
        steps = [typical([each.steps(turns)[turn + 1] for turn in steady]) for each in pair]
    else:
        first, count, phase = turns.start, len(turns), WHOLE_RUN
        steps = [each.seconds / count for each in pair]
    last = max(span.end for each in recorded.recordings for span in each.spans if span.lane == "compute")
    by_steps = [by_step(each.phases, turns) if recorded.has_phases_in_steps else {} for each in pair]
    names = dict.fromkeys(part.name for each in pair for part in each.phases)
    return Overlaid(
        method=recorded.method, source=source, phase=phase, first=first + 1, steps=count, measured=steps[0],
        simulated=steps[1], emulated=recorded.emulated, ramp_steps=recorded.schedule.drain + 1,
        shown=(turns.start + 1, turns.stop), steady_steps=len(steady),
        pauses=sum(start < last for start, _ in pauses(recorded.recordings)),
        phases=tuple(
            PhaseSeconds(phase=name, measured=measured.in_phase(name) or None,
                         simulated=simulated.in_phase(name) or None)
            for name in names
        ),
        step_phases=tuple(
            StepPhases(step=step, measured=by_steps[0][step], simulated=by_steps[1][step])
            for step in sorted(by_steps[0].keys() & by_steps[1].keys())
        ),
    )  # fmt: skip


def typical(seconds: Sequence[float]) -> float:
    """The mean of steps without unusually long ones; a median would take one of several that take turns."""
    most = UNUSUAL * median(seconds)
    return fmean([step for step in seconds if step <= most])


def describe(run: Overlaid) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The figures of an overlay, with the phase of the run that each is of: sentences, and the rows of a table."""
    first, last = run.shown
    of_steps = f"steps {run.first} to {run.first + run.steps - 1}"
    lines = [f"{run.method}: steps {first} to {last}, predicted from {run.source}"]
    if run.pauses:
        lines.append(
            f"cut out: {counted(run.pauses, 'pause')}, as for an evaluation; workers wait for each other there"
        )
    if run.phase == "steady":
        lines.append(f"in the steady state, {of_steps}:")
    else:
        short = f"only {counted(run.steady_steps, 'step')} in" if run.steady_steps else "no step in"
        after = "the first one" if run.step_phases else f"a ramp of {run.ramp_steps}"
        lines.append(f"{short} the steady state, after {after}. Of the whole run, ramp and drain included:")
    error = "" if run.emulated else f", off by {run.simulated / run.measured - 1:+.1%}"
    one = ", one device doing the work of all workers" if run.emulated else ""
    own = " on workers of their own" if run.emulated else ""
    lines.append(f"measured   {duration(run.measured)} a step{one}")
    lines.append(f"simulated  {duration(run.simulated)} a step{own}{error}")
    if run.step_phases:
        return lines, step_rows(run)
    rows = [("phase", "measured", "simulated")]
    for each in run.phases:
        measured, simulated = (
            "none" if value is None else duration(value) for value in (each.measured, each.simulated)
        )
        rows.append((each.phase, measured, simulated))
    return lines, rows


def step_rows(run: Overlaid) -> list[tuple[str, str, str]]:
    """The rows of a table: what each phase takes of the steps that the figures are of."""
    steps = [each for each in run.step_phases if run.first <= each.step < run.first + run.steps]
    measured = shares_of({each.step: each.measured for each in steps})
    simulated = shares_of({each.step: each.simulated for each in steps})
    rows = [("phase of a step, mean (least to most)", "measured", "simulated")]
    return rows + [(name, part(*measured[name]), part(*simulated[name])) for name in measured]


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'s' * (number != 1)}"
