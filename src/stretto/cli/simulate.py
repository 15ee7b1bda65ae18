"""stretto simulate: what a schedule takes in time and memory, on paper."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import aligned, inside, print_json, terminal_columns, write, write_trace
from stretto.cli.show import MethodLayout, lay_out
from stretto.errors import UsageError
from stretto.options.import_object import is_function
from stretto.settings.command_line import (
    ANY_OPTIMIZER,
    FLAG,
    NUMBER,
    NUMBERS,
    OPTIONS,
    SUITING,
    TEXTS,
    WHOLE,
    Option,
    parse_metric,
)

if TYPE_CHECKING:
    from stretto.cli.show import Advised
    from stretto.methods import Method
    from stretto.report.prediction import RunPrediction
    from stretto.simulate import Durations, Timeline
    from stretto.simulate.network import Mean
    from stretto.study.prepare import Prepared

OVERLAY = "overlay.pftrace"  # in a run's folder
MOST_COLUMNS = 400  # a drawing of more columns is no drawing
SCALED = 100  # characters of a drawing to scale that goes to no terminal


@dataclass(frozen=True, kw_only=True)
class SimulatedPipeline:
    """A method and how many stages, workers and micro-batches it is simulated with."""

    method: str | None = None
    """Method with its options, e.g. 1f1b or "paci(every=2)"; async or local, as for the network's optimizer, or AdamW,
    by the times that are simulated."""
    stages: Annotated[int, WHOLE] = 4
    """Number of stages."""
    workers: Annotated[int | None, WHOLE] = None
    """Number of workers; as many as suit the method unless said otherwise."""
    microbatches: Annotated[int | None, WHOLE] = None
    """Micro-batches that enter before the pipeline drains; 4, or a whole minibatch, unless said otherwise. A
    synchronous pipeline takes them as one minibatch."""

    def layout(self, method: str | None = None, *, advised_by: "Advised | None" = None) -> MethodLayout:
        """The schedule of its method, or of another one. Raises UsageError as `lay_out`, and where there is none."""
        chosen = method or self.method
        if chosen is None:
            raise UsageError("method is missing: give one, or --overlay with the folder of a traced run")
        return lay_out(chosen, self.stages, self.workers, self.microbatches, advised_by=advised_by)


@dataclass(frozen=True, kw_only=True)
class Times:
    """The time of each action, in a unit of the user's choice: one for all stages, or one each."""

    forward: Annotated[tuple[float, ...] | None, NUMBERS] = None
    """Time of a micro-batch's forward; 1 unless said otherwise."""
    backward: Annotated[tuple[float, ...] | None, NUMBERS] = None
    """Time of its whole backward; twice the forward unless said otherwise."""
    input_gradient: Annotated[tuple[float, ...] | None, NUMBERS] = None
    """Where a backward comes in two halves, the time of the first; half of the backward unless said otherwise."""
    weight_gradient: Annotated[tuple[float, ...] | None, NUMBERS] = None
    """The time of the second half; the rest of the backward unless said otherwise."""
    update: Annotated[tuple[float, ...] | None, NUMBERS] = None
    """Time of an update; 0 unless said otherwise."""
    learn: Annotated[tuple[float, ...] | None, NUMBERS] = None
    """Where gradients are predicted, the time of learning to; that of the forward unless said otherwise."""
    latency: Annotated[float, NUMBER] = 0.0
    """Time that a value needs from one worker to another. Nobody computes less meanwhile."""

    def durations(self, num_stages: int) -> "Durations":
        """The time of every action. Raises UsageError for times that cannot be, or as many as no stages."""
        from stretto.simulate import action_durations

        actions = {name: value for name, value in asdict(self).items() if name != "latency"}
        return action_durations(num_stages, **actions)


@dataclass(frozen=True, kw_only=True)
class SimulatedNetwork:
    """A network whose stages' costs are the times, as `stretto train` takes it."""

    model: str | None = None
    """Network, or your own, path/to/file.py:function, instead of --forward and the like: times are the seconds of its
    stages and messages on a --cluster; without one the MFLOP of its stages, a micro-batch of one example."""
    model_options: Annotated[dict[str, Option], OPTIONS] = field(default_factory=dict)
    """Its options: --model-options.width 256."""
    data: str | None = None
    """Its data set, or your own, path/to/file.py:function."""
    data_options: Annotated[dict[str, Option], OPTIONS] = field(default_factory=dict)
    """Its options."""
    loss: str = "auto"
    """Its loss: a name in torch.nn.functional, or path/to/file.py:function."""
    metric: Annotated[tuple[str, ...], TEXTS] = ()
    """Its metrics, as stretto train takes them; they take no time of a step."""
    optimizer: Annotated[str, Parameter(help=f"Its optimizer: {ANY_OPTIMIZER}. {SUITING}")] = "auto"
    batch_size: Annotated[int | None, WHOLE] = None
    """Examples of a minibatch; as many as suit the network unless said otherwise."""

    def prepared(self, layout: MethodLayout) -> "Prepared":
        """Its run under a method, heads included. Raises UsageError for what `stretto train` could not train."""
        from stretto.settings.runs import TrainSettings
        from stretto.study.model_costs import refuse_loss_in_parts
        from stretto.study.prepare import prepare_trial, resolve, with_any_rate

        assert self.model is not None, "only where a network is given"
        settings = TrainSettings(
            model=self.model,
            model_options=self.model_options,
            data=self.data,
            data_options=self.data_options,
            loss=self.loss,
            metric=self.metric,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            method=str(layout.method),
            stages=layout.schedule.num_stages,
            workers=layout.schedule.num_workers,
        )
        prepared = prepare_trial(with_any_rate(resolve(settings)))  # a rate takes no time of a step
        refuse_loss_in_parts(prepared)
        return prepared

    def traits(self, layout: MethodLayout) -> tuple[str, bool]:
        """The name of its optimizer in advice, and whether its batch norms want whole minibatches."""
        from stretto.nn.group_norm import has_batch_norm
        from stretto.optim.by_name import name_of_setting

        prepared = self.prepared(layout)
        return name_of_setting(prepared.settings.optimizer), has_batch_norm(prepared.trainer.stages)


@dataclass(frozen=True)
class ActionPrices:
    """What actions and messages take, in simulated time, of which one `unit` has `scale`.

    `prediction` has the messages, where they are known; else each takes `latency`. `batch_size` is that of a minibatch,
    where it matters.
    """

    durations: "Durations"
    latency: float = 0.0
    unit: str | None = None  # that of the user's choice
    scale: float = 1.0
    prediction: "RunPrediction | None" = None
    batch_size: int | None = None

    @property
    def draws(self) -> int:
        """How many simulations are averaged: several where messages are late at random."""
        from stretto.simulate.network import LATE_DRAWS

        network = None if self.prediction is None else self.prediction.network
        return LATE_DRAWS if network is not None and network.is_late else 1

    def makespans(self, layout: MethodLayout) -> list[float]:
        """The time of all micro-batches in each draw of late messages."""
        return [self.simulate(layout, seed).makespan / self.scale for seed in range(self.draws)]

    def simulate(self, layout: MethodLayout, seed: int = 0) -> "Timeline":
        """The timeline of all micro-batches; `seed` decides which messages are late."""
        from stretto.simulate import simulate
        from stretto.simulate.network import no_bytes

        schedule, rules, turns, told = layout.schedule, layout.rules, layout.turns, self.prediction
        if told is None:
            return simulate(schedule, rules, turns, self.durations, latency=self.latency)
        sizes, network = told.sizes or no_bytes, told.network
        network = None if network is None else replace(network, seed=seed)
        return simulate(schedule, rules, turns, self.durations, network=network, sizes=sizes)

    def steady(self, layout: MethodLayout) -> "tuple[Mean, float]":
        """As `Layout.steady`; where messages have sizes, the mean of some turns. In `unit`, with its standard error."""
        from stretto.report.prediction import busy_of, mean_period
        from stretto.simulate.network import Mean

        if self.prediction is None:
            period, bubble = layout.steady(self.durations, self.latency)
            return Mean(period / self.scale), bubble
        schedule = layout.schedule
        mean = mean_period(schedule, layout.rules, self.prediction)
        busy = sum(busy_of(schedule, worker, self.prediction) for worker in range(schedule.num_workers))
        return mean, max(0.0, 1 - busy / (mean.value * schedule.num_workers))

    def describe(self, time: float) -> str:
        """A time, given in `unit`, with it."""
        from stretto.report.units import duration, flops

        return duration(time) if self.unit == "s" else flops(1e6 * time) if self.unit == "MFLOP" else f"{time:g}"


@dataclass(frozen=True, kw_only=True)
class SimulateOutput:
    """Where a simulation is drawn and written."""

    svg: Path | None = None
    """File to draw the schedule into, to scale."""
    trace: Path | None = None
    """File for a trace that ui.perfetto.dev shows (.pftrace); one unit of time is a millisecond there."""
    json: Annotated[bool, FLAG] = False
    """Print one JSON object on stdout, nothing else."""


def simulate(
    *,
    pipeline: Annotated[SimulatedPipeline, Parameter(name="*")] = SimulatedPipeline(),
    times: Annotated[Times, Parameter(name="*")] = Times(),
    network: Annotated[SimulatedNetwork, Parameter(name="*")] = SimulatedNetwork(),
    overlay: Path | None = None,
    cluster: str | None = None,
    output: Annotated[SimulateOutput, Parameter(name="*")] = SimulateOutput(),
) -> None:
    """Time, bubble and memory of every worker under a method, from the times of its stages.

    Times are in a unit of your choice, one for all stages or one each: --forward 1,2,1,1; or, with --model, the MFLOP
    of a network's stages, or the seconds that they and their messages take on a --cluster. Or, with
    --overlay, the simulation of a run that was traced, in one file with its trace.

    Parameters
    ----------
    overlay
        Folder of a run that `stretto train --trace` has written, instead of a method and times: what its workers did
        and what they do on paper go into one trace (--trace FILE; overlay.pftrace in that folder unless said
        otherwise), worker by worker, both from the same step on. Functions of your own that the run has are called only
        if they are named again: --model, --data, --loss, --metric, --optimizer, --method.
    cluster
        With --model or --overlay, a cluster's name or its file: times are what stages and messages cost there, and not
        MFLOP, or the mean times of the run's own actions.
    """
    if overlay is not None:
        trusted = named_again(overlay, pipeline, network)
        tell_overlay(overlay, trusted, cluster, output.trace or inside(overlay, OVERLAY), json=output.json)
        return
    if pipeline.method is not None and not 0 <= times.latency < math.inf:
        raise UsageError(f"latency={times.latency:g}: a time is 0 or more")
    layout, prices = chosen_layout(pipeline, times, network, cluster)
    timeline = prices.simulate(layout)
    facts = facts_of(layout, timeline, prices)
    write_files(layout, timeline, prices, output)
    if output.json:
        written = {"svg": output.svg, "trace": output.trace}
        print_json(facts | {name: None if file is None else str(file) for name, file in written.items()})
        return
    print(describe(layout, timeline, facts, prices))
    for file in (output.svg, output.trace):
        if file is not None:
            print(f"written to {file}")


def chosen_layout(
    pipeline: SimulatedPipeline, times: Times, network: SimulatedNetwork, cluster: str | None
) -> tuple[MethodLayout, ActionPrices]:
    """The schedule, and what it takes; "async" and "local" stand for the first at a loss by the times simulated."""
    from stretto.methods.advice import advised
    from stretto.methods.table import is_advised

    if not is_advised(pipeline.method):
        layout = pipeline.layout()
        return layout, prices_of(times, network, layout, cluster)
    known: dict[str, ActionPrices] = {}  # a network is prepared once for each method that is tried

    def seconds(chosen: "Method") -> float:
        layout = pipeline.layout(str(chosen))
        prices = known[str(layout.method)] = prices_of(times, network, layout, cluster)
        turn, _ = prices.steady(layout)
        return turn.value if prices.batch_size is not None else turn.value / layout.schedule.per_turn

    def advised_by(word: str, stages: int) -> "Method":
        optimizer, whole = ("adamw", False) if network.model is None else network.traits(pipeline.layout("backprop"))
        return advised(word, optimizer, stages, whole=whole, seconds=seconds)

    layout = pipeline.layout(advised_by=advised_by)
    return layout, known.get(str(layout.method)) or prices_of(times, network, layout, cluster)


def prices_of(times: Times, network: SimulatedNetwork, layout: MethodLayout, cluster: str | None) -> ActionPrices:
    """What everything takes: as given, or from a network. Raises UsageError where both are given."""
    if network.model is None:
        for name, value in (("data", network.data), ("cluster", cluster), ("batch_size", network.batch_size)):
            if value is not None:
                raise UsageError(f"{name}={value} without a network: give --model, too")
        return ActionPrices(times.durations(layout.schedule.num_stages), times.latency)
    given = [name for name, value in asdict(times).items() if name != "latency" and value is not None]
    if given:
        raise UsageError(f"{given[0]} beside model={network.model}, whose stages have costs: give one of both")
    if cluster is None:
        return ActionPrices(megaflops(network.prepared(layout)), times.latency, "MFLOP")
    if times.latency:
        raise UsageError(
            f"latency={times.latency:g} beside cluster={cluster}, whose links have theirs: give one of both"
        )
    from stretto.cost import find_cluster
    from stretto.study.predicted_runs import predict_untrained

    found = find_cluster(cluster)  # before the network is built
    prepared = network.prepared(layout)
    prediction = predict_untrained(prepared, found)
    return ActionPrices(prediction.durations, 0.0, "s", 1e9, prediction, prepared.settings.batch_size)


def megaflops(prepared: "Prepared") -> "Durations":
    """The MFLOP of every action of a run, for micro-batches of one example."""
    from stretto.measure.flops import durations
    from stretto.study.prepare import costs_of

    return durations({action: count / 1e6 for action, count in costs_of(prepared).flops.items()})


def facts_of(layout: MethodLayout, timeline: "Timeline", prices: ActionPrices) -> dict[str, Any]:
    """What the simulation came to, as plain data; times are means over draws where messages are late at random."""
    from stretto.simulate.network import Mean

    period, bubble = prices.steady(layout)
    makespan, drawn = Mean(timeline.makespan / prices.scale), {}
    if prices.draws > 1:
        makespans = prices.makespans(layout)
        makespan = Mean.of(makespans)
        drawn = {
            "late_draws": prices.draws,
            "makespans": makespans,
            "makespan_standard_error": makespan.error,
            "steady_period_standard_error": period.error,
        }
    return {
        **layout.names,
        "stages": layout.schedule.num_stages,
        "microbatches": layout.microbatches,
        "minibatches": layout.turns,
        "batch_size": prices.batch_size,
        "unit": prices.unit,
        "latency": prices.latency,
        "makespan": makespan.value,
        **drawn,
        "bubble": timeline.bubble,
        "steady_period": period.value,
        "steady_bubble": bubble,
        "workers": by_worker(layout, timeline, prices.scale),
    }


def write_files(layout: MethodLayout, timeline: "Timeline", prices: ActionPrices, output: SimulateOutput) -> None:
    """Write the files that were asked for."""
    from stretto.schedule import draw

    if output.svg is not None:
        write(output.svg, draw.svg(timeline.spans, title=f"{layout.method} on {layout.schedule.num_workers} workers"))
    if output.trace is not None:
        from stretto.simulate.timeline import UNIT, recordings
        from stretto.tracing.run_phases import tracks

        unit = 1e9 / prices.scale if prices.unit == "s" else UNIT
        simulated = recordings(timeline, layout.rules, unit=unit)
        write_trace(output.trace, simulated, tracks(simulated, layout.schedule, layout.rules))


def describe(layout: MethodLayout, timeline: "Timeline", facts: dict[str, Any], prices: ActionPrices) -> str:
    """The drawing, the times and a table of the workers."""
    from stretto.schedule.draw import idle_share

    makespan, period = prices.describe(facts["makespan"]), prices.describe(facts["steady_period"])
    examples = "" if prices.batch_size is None else f", {prices.batch_size} examples a minibatch"
    late = ""
    if "makespans" in facts:
        least, most = (prices.describe(pick(facts["makespans"])) for pick in (min, max))
        errors = (prices.describe(facts[f"{name}_standard_error"]) for name in ("makespan", "steady_period"))
        late = (
            f"some messages are late, at random: times above are means of {facts['late_draws']} draws, with standard "
            f"errors of {' and '.join(errors)}; the first is from {least} to {most}; drawing and table are the first "
            "draw's\n\n"
        )
    idle, turn = f"{idle_share(facts['steady_bubble'], 1)} idle", f"a turn of {layout.schedule.per_turn}"
    return (
        f"{layout.title}\n\n{drawing(timeline, prices)}\n\n"
        f"{f'{layout.microbatches} micro-batches':<20} {makespan}, {idle_share(timeline.bubble, 1)} idle{examples}\n"
        f"{'steady state':<20} {period} {turn}, {idle}\n\n"
        f"{late}{table(facts['workers'], prices)}"
    )


def named_again(folder: Path, pipeline: SimulatedPipeline, network: SimulatedNetwork) -> tuple[str, ...]:
    """The functions of the user's that the command names, as the run of an overlay does.

    Raises UsageError for anything else that the run has already.
    """
    names = ("model", "data", "loss", "metric", "optimizer")
    given = {name: getattr(network, name) for name in names} | {"method": pipeline.method}
    usual = SimulatedNetwork()
    trusted = []
    for name, value in given.items():
        for text in (value if isinstance(value, tuple) else (value,)) if value != getattr(usual, name, None) else ():
            if not is_function(text):
                raise UsageError(f"{name}={text} beside overlay={folder}, whose run has one: give one of both")
            trusted.append(parse_metric(text)[1] if name == "metric" else text)
    return tuple(trusted)


def tell_overlay(folder: Path, trusted: Sequence[str], cluster: str | None, file: Path, *, json: bool) -> None:
    """Write a run and its simulation into one trace, and say how far they are apart."""
    from stretto.cost import find_cluster
    from stretto.study.overlay import describe, overlaid

    recordings, phases, run = overlaid(folder, None if cluster is None else find_cluster(cluster), trusted)
    write_trace(file, recordings, phases)
    error = run.simulated / run.measured - 1
    if json:
        print_json({**asdict(run), "error": error, "trace": str(file)})
        return
    lines, rows = describe(run)
    print("\n".join([*lines, aligned(rows)]))
    print(f"written to {file}")


def by_worker(layout: MethodLayout, timeline: "Timeline", scale: float) -> list[dict[str, Any]]:
    """What each worker holds and does, its times divided by `scale`.

    Where it has several stages, the versions of weights are a list.
    """
    versions = layout.method.versions(layout.schedule)
    homes = layout.schedule.worker_of
    rows = []
    for worker, busy in enumerate(timeline.busy):
        stages = sorted(stage for stage, home in homes.items() if home == worker)
        held = [versions[stage] for stage in stages]
        rows.append(
            {
                "stages": stages,
                "busy": busy / scale,
                "busy_share": busy / timeline.makespan if timeline.makespan else 0.0,
                "peak_activations": timeline.peak_activations[worker],
                "weight_versions": held[0] if len(held) == 1 else held,
            }
        )
    return rows


def table(workers: list[dict[str, Any]], prices: ActionPrices) -> str:
    """The workers in rows, columns aligned."""
    rows = [("worker", "stages", "busy", "", "activations held", "weight versions")]
    for worker, facts in enumerate(workers):
        versions = facts["weight_versions"]
        held = " ".join(map(str, versions if isinstance(versions, list) else [versions]))
        stages, activations = " ".join(map(str, facts["stages"])), str(facts["peak_activations"])
        busy, share = prices.describe(facts["busy"]), f"{facts['busy_share']:.1%}"
        rows.append((str(worker), stages, busy, share, activations, held))
    return aligned(rows)


def drawing(timeline: "Timeline", prices: ActionPrices) -> str:
    """The schedule in characters: columns if its times have a common measure that leaves it readable, else to scale."""
    from stretto.schedule import draw

    width = terminal_columns()
    lengths = sorted({span.end - span.start for span in timeline.spans} | {prices.latency})
    near = [Fraction(length).limit_denominator(1000) for length in lengths]
    unit = common_measure(near)
    exact = all(math.isclose(a, b) for a, b in zip(lengths, near, strict=True))
    if not unit or not exact or timeline.makespan / unit > MOST_COLUMNS:
        return draw.text(timeline.spans, None, width or SCALED)
    column = prices.describe(float(unit) / prices.scale)
    return f"{draw.text(timeline.spans, float(unit), width or 1000)}\n(one column is {column})"


def common_measure(lengths: list[Fraction]) -> Fraction:
    """The longest time that all lengths are multiples of; 0 where all are 0."""
    common = math.lcm(*(length.denominator for length in lengths))
    return Fraction(math.gcd(*(int(length * common) for length in lengths)), common)
