"""A traced run compared with a prediction: every step, the time of every worker, the memory of every stage.

Communication is what a step takes longer than it would with messages that take no time: of the run, by simulating it
with the durations that its actions had; of the prediction, by simulating it with its own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from stretto.report import units
from stretto.report.turns import RecordedRun, action_of, mean_durations, turn_starts
from stretto.schedule import Rules, Schedule
from stretto.simulate.idle_share import RESOLUTION
from stretto.tracing import Recording

if TYPE_CHECKING:
    import altair as alt

    from stretto.report.chart_store import ChartSpecs
    from stretto.simulate import Durations, Network
    from stretto.simulate.network import Sizes

MEAN_TIMES = "the mean times of the run's own actions, messages taking none"
MIN_STEPS = 3  # of a full pipeline: with fewer there is no comparison
MEASURED, PREDICTED = "#0b63a5", "#c2410c"  # colors
HEIGHT = 210
MOST_POINTS = 400  # of longer runs every second step, or third, ...
CLIPPED_AT = 3.0  # times the typical step: longer ones, in which other programs had the processor, stand at the edge


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """What a prediction is made from.

    `durations` gives the nanoseconds of an action; `network` and `sizes` price messages, which take no time without
    them. `weights` and `activations` (of one micro-batch) are bytes by stage, empty where they are not known. `source`
    names all this in a sentence.
    """

    source: str
    durations: "Durations"
    network: "Network | None" = None
    sizes: "Sizes | None" = None
    weights: tuple[float, ...] = ()
    activations: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity as measured and as predicted; None for an unknown value."""

    name: str
    unit: str  # "s" or "B", or nothing for a count
    measured: float | None
    predicted: float | None

    @property
    def error(self) -> float | None:
        """predicted / measured - 1: positive where the prediction is too large; None where either is unknown."""
        if self.measured is None or self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """A run compared with its prediction.

    `steps` are its measured {step: seconds} with a full pipeline, without those after which the run paused; `seconds`
    is the prediction for every one of them.
    """

    run: str
    method: str
    source: str
    steps: Mapping[int, float]
    seconds: float
    rows: tuple[Comparison, ...] = field(default=())
    emulated: bool = False

    @property
    def errors(self) -> list[float]:
        """predicted / measured - 1 for every step."""
        return [self.seconds / measured - 1 for measured in self.steps.values()]

    @property
    def mean_error(self) -> float:
        """The mean of |predicted / measured - 1| over all steps."""
        return fmean(abs(error) for error in self.errors)


def compare_with_prediction(
    recorded: RecordedRun,
    prediction: RunPrediction,
    *,
    paused: Collection[int] = (),
    held: Mapping[str, Sequence[float]] | None = None,
) -> PredictedRun | None:
    """Compare a recorded run with a prediction; None if fewer than MIN_STEPS steps had a full pipeline.

    `paused` are the steps, counted from 1, after which the run was evaluated or saved. `held` are the most bytes that
    each stage held at any time ("weights", "activations").
    """
    recordings, schedule, rules = recorded.recordings, recorded.schedule, recorded.rules
    steps = steps_of(recordings[0], schedule, recorded.steady, paused)
    if len(steps) < MIN_STEPS:
        return None
    measured = mean_durations(recordings, schedule, recorded.steady)
    turns = [turn - 1 for turn in steps]
    computed = computing(recordings, schedule, turns)
    if recorded.emulated:
        seconds = sum(busy_of(schedule, worker, prediction) for worker in range(schedule.num_workers))
        rows = [Comparison(name="a step", unit="s", measured=median(steps.values()), predicted=seconds)]
        rows += computes(computed, schedule, prediction)
    else:
        seconds = period_of(schedule, rules, prediction)
        without_messages = period_of(schedule, rules, RunPrediction(source="", durations=measured))
        ideal = period_of(schedule, rules, RunPrediction(source="", durations=prediction.durations))
        step = median(steps.values())
        rows = [
            Comparison(name="a step", unit="s", measured=step, predicted=seconds),
            Comparison(name="of it communication", unit="s", measured=max(0.0, step - without_messages),
                       predicted=seconds - ideal),
            *computes(computed, schedule, prediction),
            *(
                Comparison(name=f"worker {worker} stands still", unit="s", measured=max(0.0, step - busy),
                         predicted=seconds - busy_of(schedule, worker, prediction))
                for worker, busy in enumerate(computed)
            ),
        ]  # fmt: skip
    rows += memory(recordings, schedule, rules, prediction, held or {})
    return PredictedRun(
        run=recorded.run,
        method=recorded.method,
        source=prediction.source,
        steps=steps,
        seconds=seconds,
        rows=tuple(rows),
        emulated=recorded.emulated,
    )


def steps_of(recording: Recording, schedule: Schedule, among: range, paused: Collection[int]) -> dict[int, float]:
    """{step: seconds from its start on the first worker to the start of the next}; steps count from 1."""
    starts = turn_starts(recording, schedule)
    return {
        turn + 1: (starts[turn + 1] - start) / 1e9
        for turn, start in sorted(starts.items())
        if turn in among and turn + 1 in starts and turn + 1 not in paused
    }


def computing(recordings: Sequence[Recording], schedule: Schedule, turns: Collection[int]) -> list[float]:
    """The mean seconds that each worker computes per minibatch, over these turns."""
    chosen = set(turns)
    seconds = []
    for recording in recordings:
        spans = [(span, action) for span in recording.spans if (action := action_of(span)) is not None]
        times = [span.end - span.start for span, action in spans if action.microbatch // schedule.per_turn in chosen]
        seconds.append(sum(times) / len(chosen) / 1e9)
    return seconds


def computes(computed: Sequence[float], schedule: Schedule, prediction: RunPrediction) -> list[Comparison]:
    """Measured and predicted seconds that each worker computes per minibatch."""
    return [
        Comparison(name=f"worker {worker} computes", unit="s", measured=busy,
                 predicted=busy_of(schedule, worker, prediction))
        for worker, busy in enumerate(computed)
    ]  # fmt: skip


def busy_of(schedule: Schedule, worker: int, prediction: RunPrediction) -> float:
    """The predicted seconds that a worker computes in a turn."""
    return sum(prediction.durations(action) for action in schedule.body[worker]) / 1e9


def period_of(schedule: Schedule, rules: Rules, prediction: RunPrediction) -> float:
    """The predicted seconds of a turn once the pipeline is full, waits for links included."""
    from stretto.simulate import simulate
    from stretto.simulate.network import no_bytes

    settled, averaged = 4 * (schedule.drain + 1), 12  # turns
    timeline = simulate(
        schedule, rules, settled + averaged + schedule.drain + 1, prediction.durations,
        network=prediction.network, sizes=prediction.sizes or no_bytes,
    )  # fmt: skip
    kind, stage, offset = schedule.body[0][0]
    starts = {
        span.action.microbatch // schedule.per_turn: span.start
        for span in timeline.spans
        if span.action[:2] == (kind, stage) and (span.action.microbatch - offset) % schedule.per_turn == 0
    }
    first = min(starts) + settled
    return (starts[first + averaged] - starts[first]) / averaged / 1e9


def memory(
    recordings: Sequence[Recording], schedule: Schedule, rules: Rules, prediction: RunPrediction,
    held: Mapping[str, Sequence[float]],
) -> list[Comparison]:  # fmt: skip
    """The most that each stage holds at any time: forwards, and bytes where they are known."""
    from stretto.simulate import simulate

    timeline = simulate(schedule, rules, 2 * schedule.drain + 2, prediction.durations)
    counted = most_counted(recordings)
    rows = []
    for stage in range(schedule.num_stages):
        keeps = timeline.peak_graphs[stage] + timeline.peak_inputs[stage]
        rows.append(Comparison(name=f"stage {stage}, forwards held", unit="", measured=counted.get(stage),
                             predicted=keeps))  # fmt: skip
        bytes_ = {"weights": prediction.weights, "activations": [of_one * keeps for of_one in prediction.activations]}
        for what, by_stage in bytes_.items():
            if by_stage:
                measured = held.get(what, ())
                rows.append(Comparison(name=f"stage {stage}, {what}", unit="B", predicted=by_stage[stage],
                                     measured=float(measured[stage]) if measured else None))  # fmt: skip
    return rows


def most_counted(recordings: Sequence[Recording]) -> dict[int, float]:
    """The most forwards that each stage held, as its worker counted them."""
    most: dict[int, float] = {}
    for recording in recordings:
        for name, _, value in recording.counts:
            if name.startswith("forwards held by stage "):
                stage = int(name.rsplit(" ", 1)[1])
                most[stage] = max(most.get(stage, 0.0), value)
    return most


def section(run: PredictedRun, index: int, specs: "ChartSpecs") -> dict[str, Any]:
    """The part of the page on a run; `index` tells its chart from those of other runs."""
    errors = sorted(abs(error) for error in run.errors)
    return {
        "method": run.method,
        "run": run.run,
        "source": run.source,
        "emulated": run.emulated,
        "place": specs.add(f"predicted-{index}", predicted_chart(run)),
        "steps": len(errors),
        "mean": units.percent(run.mean_error),
        "median": units.percent(errors[len(errors) // 2]),
        "worst": units.percent(errors[-1]),
        "rows": [_row(row, run.seconds) for row in run.rows],
    }


def _row(row: Comparison, step: float) -> dict[str, str]:
    def share(seconds: float) -> str:
        return "none" if seconds < RESOLUTION * step else units.duration(seconds)

    forms: dict[str, Callable[[float], str]] = {"s": share, "B": units.bytes_held, "": "{:g}".format}
    form = forms[row.unit]
    measured, predicted = (units.NONE if value is None else form(value) for value in (row.measured, row.predicted))
    error = units.NONE if row.error is None else f"{100 * row.error:+.1f} %"
    return {"name": row.name, "measured": measured, "predicted": predicted, "error": error}


def predicted_chart(run: PredictedRun) -> "alt.LayerChart":
    """Seconds of each step against the step; the prediction is a horizontal line."""
    import altair as alt

    from stretto.report.encodings import data

    steps = list(run.steps.items())[:: max(1, len(run.steps) // MOST_POINTS)]
    typical = sorted(seconds for _, seconds in steps)[len(steps) // 2]
    scale, unit = units.time_unit(max(run.seconds, typical))
    most = CLIPPED_AT * max(typical, run.seconds)
    points = [
        {"step": step, "value": min(seconds, most) / scale, "what": "measured", "took": units.duration(seconds),
         "error": units.percent(run.seconds / seconds - 1)}
        for step, seconds in steps
    ]  # fmt: skip
    ends = [
        {"step": step, "value": run.seconds / scale, "what": "predicted", "took": units.duration(run.seconds)}
        for step in (steps[0][0], steps[-1][0])
    ]
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="d", tickCount=8))
    top = min(most, 1.1 * max(run.seconds, *(seconds for _, seconds in steps))) / scale
    y = alt.Y("value:Q", title=f"a step, {unit}", scale=alt.Scale(domain=[0, top]), axis=alt.Axis(tickCount=5))
    legend = alt.Legend(title=None, orient="top", direction="horizontal")
    colors = alt.Scale(domain=["measured", "predicted"], range=[MEASURED, PREDICTED])
    color = alt.Color("what:N", scale=colors, legend=legend)
    hints = [alt.Tooltip("step:Q"), alt.Tooltip("took:N"), alt.Tooltip("error:N", title="predicted is off by")]
    dots = alt.Chart(data(points)).mark_point(filled=True, size=22, opacity=0.65)
    line = alt.Chart(data(ends)).mark_line(strokeWidth=2)
    return alt.LayerChart(
        layer=[dots.encode(x=x, y=y, color=color, tooltip=hints), line.encode(x=x, y=y, color=color)]
    ).properties(width="container", height=HEIGHT)
