"""A traced run compared with a prediction: every step, the time of every worker, the memory of every stage.

Communication is what a step takes longer than it would with messages that take no time: of the run, by simulating it
with the durations that its actions had; of the prediction, by simulating it with its own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from stretto.report import units
from stretto.report.recorded_run import MIN_STEPS, RecordedRun, excerpts, mean_durations, steps_of
from stretto.schedule import Rules, Schedule
from stretto.schedule.draw import RESOLUTION
from stretto.tracing import Recording
from stretto.tracing.run_phases import DRAIN, RAMP, STEADY, action_of

if TYPE_CHECKING:
    import altair as alt

    from stretto.report.charts import ChartSpecs
    from stretto.simulate import Durations, Network
    from stretto.simulate.network import Mean, Sizes

MEAN_TIMES = "the mean times of the run's own actions, messages taking none"
OWN_TIMES = "the time that each of the run's own actions took, messages taking none"
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
    is the prediction for every one of them. Of a run without a steady state they are all its steps, the drain in the
    last one; `expected` has the prediction for each, and `seconds` is their mean.
    """

    run: str
    method: str
    source: str
    steps: Mapping[int, float]
    seconds: float
    rows: tuple[Comparison, ...] = field(default=())
    emulated: bool = False
    expected: Mapping[int, float] = field(default_factory=dict)

    def predicted(self, step: int) -> float:
        """The predicted seconds of a step."""
        return self.expected.get(step, self.seconds)

    @property
    def errors(self) -> list[float]:
        """predicted / measured - 1 for every step."""
        return [self.predicted(step) / measured - 1 for step, measured in self.steps.items() if measured]

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
    """Compare a recorded run with a prediction; None if nothing of its schedule was recorded.

    A run without a steady state is compared turn by turn with as many simulated ones. `paused` are the steps, counted
    from 1, after which the run was evaluated or saved; they count only where too few others are left, without the
    pause. `held` are the most bytes that each stage held at any time ("weights", "activations").
    """
    recordings, schedule, rules = recorded.training, recorded.schedule, recorded.rules
    if not recorded.is_steady:
        return compare_short_run(recorded, prediction, held or {})
    steps = steps_of(recordings[0], schedule, recorded.steady, paused)
    if len(steps) < MIN_STEPS:
        steps = steps_of(recordings[0], schedule, recorded.steady)
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
        waits = max(0.0, step - without_messages)
        rows = [
            Comparison(name="a step", unit="s", measured=step, predicted=seconds),
            Comparison(name="of it communication", unit="s", measured=waits, predicted=seconds - ideal),
            *computes(computed, schedule, prediction),
        ]
        for worker, busy in enumerate(computed):
            name, idle = f"worker {worker} stands still", seconds - busy_of(schedule, worker, prediction)
            rows.append(Comparison(name=name, unit="s", measured=max(0.0, step - busy), predicted=idle))
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


def compare_short_run(
    recorded: RecordedRun, prediction: RunPrediction, held: Mapping[str, Sequence[float]]
) -> PredictedRun | None:
    """Compare all turns of a run without a steady state with as many simulated ones, ramp and drain included."""
    stretch = recorded.longest
    if stretch is None:
        return None
    measured, simulated = excerpts(
        recorded, stretch, stretch.turns, prediction.durations, network=prediction.network, sizes=prediction.sizes
    )
    steps, expected = measured.steps(stretch.turns), simulated.steps(stretch.turns)
    seconds = simulated.seconds
    if recorded.emulated:
        expected = one_device(recorded.schedule, stretch.turns, prediction)
        seconds = sum(expected.values())
    rows = [Comparison(name="all steps", unit="s", measured=measured.seconds, predicted=seconds)]
    if not recorded.emulated:
        for phase in (RAMP, STEADY, DRAIN):
            if any(each.name == phase for each in (*measured.phases, *simulated.phases)):
                took, expects = measured.in_phase(phase), simulated.in_phase(phase)
                rows.append(Comparison(name=f"of them {phase}", unit="s", measured=took, predicted=expects))
    rows += memory(recorded.training, recorded.schedule, recorded.rules, prediction, held, turns=len(stretch.turns))
    return PredictedRun(
        run=recorded.run,
        method=recorded.method,
        source=prediction.source,
        steps=steps,
        seconds=fmean(expected.values()),
        rows=tuple(rows),
        emulated=recorded.emulated,
        expected=expected,
    )


def one_device(schedule: Schedule, turns: range, prediction: RunPrediction) -> dict[int, float]:
    """{step: predicted seconds} where one device does the work of all workers; the last step drains."""
    first, last = turns.start * schedule.per_turn, turns.stop * schedule.per_turn
    seconds: dict[int, float] = {}
    for turn in range(turns.start, turns.stop + schedule.drain):
        until = last if turn >= turns.stop else None
        work = (
            prediction.durations(action)
            for worker in range(schedule.num_workers)
            for action in schedule.turn(worker, turn, until, first)
        )
        step = min(turn, turns.stop - 1) + 1
        seconds[step] = seconds.get(step, 0.0) + sum(work) / 1e9
    return seconds


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
    expected = [busy_of(schedule, worker, prediction) for worker in range(len(computed))]
    return [
        Comparison(name=f"worker {worker} computes", unit="s", measured=busy, predicted=expected[worker])
        for worker, busy in enumerate(computed)
    ]


def busy_of(schedule: Schedule, worker: int, prediction: RunPrediction) -> float:
    """The predicted seconds that a worker computes in a turn."""
    return sum(prediction.durations(action) for action in schedule.body[worker]) / 1e9


def period_of(schedule: Schedule, rules: Rules, prediction: RunPrediction) -> float:
    """The predicted seconds of a turn once the pipeline is full, waits for links included.

    Where messages are late at random, the mean over LATE_DRAWS simulations.
    """
    return mean_period(schedule, rules, prediction).value


def mean_period(schedule: Schedule, rules: Rules, prediction: RunPrediction) -> "Mean":
    """As `period_of`, with the standard error of a mean over draws."""
    from stretto.simulate.network import LATE_DRAWS, Mean

    network = prediction.network
    if network is None or not network.is_late:
        return Mean(drawn_period(schedule, rules, prediction))
    draws = (replace(prediction, network=replace(network, seed=seed)) for seed in range(LATE_DRAWS))
    return Mean.of([drawn_period(schedule, rules, draw) for draw in draws])


def drawn_period(schedule: Schedule, rules: Rules, prediction: RunPrediction) -> float:
    """As `period_of`, with one draw of late messages."""
    from stretto.simulate import simulate
    from stretto.simulate.network import no_bytes

    settled, averaged = 4 * (schedule.drain + 1), 12  # turns
    timeline = simulate(
        schedule,
        rules,
        settled + averaged + schedule.drain + 1,
        prediction.durations,
        network=prediction.network,
        sizes=prediction.sizes or no_bytes,
    )
    kind, stage, offset = schedule.body[0][0]
    starts = {
        span.action.microbatch // schedule.per_turn: span.start
        for span in timeline.spans
        if span.action[:2] == (kind, stage) and (span.action.microbatch - offset) % schedule.per_turn == 0
    }
    first = min(starts) + settled
    return (starts[first + averaged] - starts[first]) / averaged / 1e9


def memory(
    recordings: Sequence[Recording],
    schedule: Schedule,
    rules: Rules,
    prediction: RunPrediction,
    held: Mapping[str, Sequence[float]],
    *,
    turns: int | None = None,
) -> list[Comparison]:
    """The most that each stage holds at any time: forwards, and bytes where they are known.

    Of a run of so many `turns`; of one with a steady state unless they are given.
    """
    from stretto.simulate import simulate

    timeline = simulate(schedule, rules, turns or 2 * schedule.drain + 2, prediction.durations)
    counted = most_counted(recordings)
    rows = []
    for stage in range(schedule.num_stages):
        keeps = timeline.peak_graphs[stage] + timeline.peak_inputs[stage]
        name = f"stage {stage}, forwards held"
        rows.append(Comparison(name=name, unit="", measured=counted.get(stage), predicted=keeps))
        bytes_ = {"weights": prediction.weights, "activations": [of_one * keeps for of_one in prediction.activations]}
        for what, by_stage in bytes_.items():
            if by_stage:
                name, measured = f"stage {stage}, {what}", held.get(what, ())
                of_stage = float(measured[stage]) if measured else None
                rows.append(Comparison(name=name, unit="B", measured=of_stage, predicted=by_stage[stage]))
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
        "steady": not run.expected,
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

    from stretto.report.charts import Layer, data

    steps = list(run.steps.items())[:: max(1, len(run.steps) // MOST_POINTS)]
    typical = sorted(seconds for _, seconds in steps)[len(steps) // 2]
    longest = run.seconds
    if run.expected:  # a short run: its ramp and its drain are what is to be seen
        typical, longest = max(run.steps.values()), max(run.expected.values())
    scale, unit = units.time_unit(max(longest, typical))
    most = CLIPPED_AT * max(typical, longest)
    points = [
        {
            "step": step,
            "value": min(seconds, most) / scale,
            "what": "measured",
            "took": units.duration(seconds),
            "error": units.percent(run.predicted(step) / seconds - 1) if seconds else units.NONE,
        }
        for step, seconds in steps
    ]
    shown = [step for step, _ in steps] if run.expected else [steps[0][0], steps[-1][0]]
    ends = [
        {
            "step": step,
            "value": min(run.predicted(step), most) / scale,
            "what": "predicted",
            "took": units.duration(run.predicted(step)),
        }
        for step in shown
    ]
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format="d", tickCount=8))
    top = min(most, 1.1 * max(longest, *(seconds for _, seconds in steps))) / scale
    y = alt.Y("value:Q", title=f"a step, {unit}", scale=alt.Scale(domain=[0, top]), axis=alt.Axis(tickCount=5))
    legend = alt.Legend(title=None, orient="top", direction="horizontal")
    colors = alt.Scale(domain=["measured", "predicted"], range=[MEASURED, PREDICTED])
    color = alt.Color("what:N", scale=colors, legend=legend)
    hints = [alt.Tooltip("step:Q"), alt.Tooltip("took:N"), alt.Tooltip("error:N", title="predicted is off by")]
    dots = Layer(data(points)).mark_point(filled=True, size=22, opacity=0.65)
    line = Layer(data(ends)).mark_line(strokeWidth=2)
    layers = [dots.encode(x=x, y=y, color=color, tooltip=hints), line.encode(x=x, y=y, color=color)]
    return alt.LayerChart(layer=layers, width="container", height=HEIGHT)
