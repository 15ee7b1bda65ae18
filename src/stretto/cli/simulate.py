"""stretto simulate: what a schedule takes in time and memory, on paper."""

import math
import shutil
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stretto.cli.output import FLAG, aligned, print_json, write, write_trace
from stretto.settings.command_line import NUMBER, NUMBERS, WHOLE

if TYPE_CHECKING:
    from stretto.cli.layout import Layout
    from stretto.simulate import Timeline

MOST_COLUMNS = 400  # a drawing of more columns is no drawing


def simulate(
    *,
    method: str | None = None,
    stages: Annotated[int, WHOLE] = 4,
    workers: Annotated[int | None, WHOLE] = None,
    microbatches: Annotated[int | None, WHOLE] = None,
    forward: Annotated[tuple[float, ...] | None, NUMBERS] = None,
    backward: Annotated[tuple[float, ...] | None, NUMBERS] = None,
    input_gradient: Annotated[tuple[float, ...] | None, NUMBERS] = None,
    weight_gradient: Annotated[tuple[float, ...] | None, NUMBERS] = None,
    update: Annotated[tuple[float, ...] | None, NUMBERS] = None,
    latency: Annotated[float, NUMBER] = 0.0,
    overlay: Path | None = None,
    cluster: str | None = None,
    svg: Path | None = None,
    trace: Path | None = None,
    json: Annotated[bool, FLAG] = False,
) -> None:
    """Time, bubble and memory of every worker under a method, from the times of its stages.

    Times are in a unit of your choice, one for all stages or one each: --forward 1,2,1,1. Or, with --overlay, the
    simulation of a run that was traced, in one file with its trace.

    Parameters
    ----------
    method
        Method with its options, e.g. 1f1b or "paci(every=2)".
    stages
        Number of stages.
    workers
        Number of workers; as many as suit the method unless said otherwise.
    microbatches
        Micro-batches that enter before the pipeline drains; 4, or a whole minibatch, unless said otherwise. A
        synchronous pipeline takes them as one minibatch.
    forward
        Time of a micro-batch's forward; 1 unless said otherwise.
    backward
        Time of its whole backward; twice the forward unless said otherwise.
    input_gradient
        Where a backward comes in two halves, the time of the first; half of the backward unless said otherwise.
    weight_gradient
        The time of the second half; the rest of the backward unless said otherwise.
    update
        Time of an update; 0 unless said otherwise.
    latency
        Time that a value needs from one worker to another. Nobody computes less meanwhile.
    overlay
        Folder of a run that `stretto train --trace` has written, instead of a method and times: what its workers did
        and what they do on paper go into one trace (--trace FILE; overlay.pftrace in that folder unless said
        otherwise), worker by worker, both from the same step on.
    cluster
        With --overlay, a cluster's name or its file: times are what stages and messages cost there, and not the mean
        times of the run's own actions.
    svg
        File to draw the schedule into, to scale.
    trace
        File for a trace that ui.perfetto.dev shows (.pftrace); one unit of time is a millisecond there.
    json
        Print one JSON object on stdout, nothing else.
    """
    from stretto import simulate as paper
    from stretto.cli.layout import lay_out
    from stretto.errors import UsageError
    from stretto.schedule import draw

    if overlay is not None:
        tell_overlay(overlay, method, cluster, trace or overlay / "overlay.pftrace", json=json)
        return
    if method is None:
        raise UsageError("method is missing: give one, or --overlay with the folder of a traced run")
    if not 0 <= latency < math.inf:
        raise UsageError(f"latency={latency:g}: a time is 0 or more")
    layout = lay_out(method, stages, workers, microbatches)
    times = paper.action_durations(
        stages,
        forward=forward,
        backward=backward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        update=update,
    )
    timeline = paper.simulate(layout.schedule, layout.rules, layout.turns, times, latency=latency)
    steady, steady_bubble = layout.steady(times, latency)
    facts: dict[str, Any] = {
        "method": str(layout.method),
        "stages": stages,
        "microbatches": layout.microbatches,
        "minibatches": layout.turns,
        "latency": latency,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "steady_period": steady,
        "steady_bubble": steady_bubble,
        "workers": by_worker(layout, timeline),
        "svg": None if svg is None else str(svg),
        "trace": None if trace is None else str(trace),
    }
    if svg is not None:
        write(svg, draw.svg(timeline.spans, title=f"{layout.method} on {layout.schedule.num_workers} workers"))
    if trace is not None:
        from stretto.simulate.recordings import recordings

        write_trace(trace, recordings(timeline, layout.rules))
    if json:
        print_json(facts)
        return
    print(f"{layout.method}: {layout.method.summary}\n\n{drawing(timeline, latency)}\n")
    print(f"{f'{layout.microbatches} micro-batches':<20} {timeline.makespan:g}, {timeline.bubble:.1%} idle")
    print(f"{'steady state':<20} {steady:g} a turn of {layout.schedule.per_turn}, {steady_bubble:.1%} idle\n")
    print(table(facts["workers"]))
    for file in (svg, trace):
        if file is not None:
            print(f"written to {file}")


def tell_overlay(folder: Path, method: str | None, cluster: str | None, file: Path, *, json: bool) -> None:
    """Write a run and its simulation into one trace, and say how far they are apart."""
    from stretto.cost import find_cluster
    from stretto.errors import UsageError
    from stretto.report.units import duration
    from stretto.study.prediction import overlaid

    if method is not None:
        raise UsageError(f"method={method} beside overlay={folder}, whose run has one: give one of both")
    both, told = overlaid(folder, None if cluster is None else find_cluster(cluster))
    write_trace(file, both)
    off = told.simulated / told.measured - 1
    if json:
        print_json({**asdict(told), "error": off, "trace": str(file)})
        return
    print(f"{told.method}: steps {told.first} to {told.first + told.steps - 1}, predicted from {told.source}")
    print(f"measured   {duration(told.measured)} a step\nsimulated  {duration(told.simulated)}, off by {off:+.1%}")
    print(f"written to {file}")


def by_worker(layout: "Layout", timeline: "Timeline") -> list[dict[str, Any]]:
    """What each worker holds and does. Where it has several stages, the versions of weights are a list."""
    versions = layout.method.versions(layout.schedule)
    homes = layout.schedule.worker_of
    rows = []
    for worker, busy in enumerate(timeline.busy):
        own = sorted(stage for stage, home in homes.items() if home == worker)
        held = [versions[stage] for stage in own]
        rows.append(
            {
                "stages": own,
                "busy": busy,
                "busy_share": busy / timeline.makespan if timeline.makespan else 0.0,
                "peak_activations": timeline.peak_activations[worker],
                "weight_versions": held[0] if len(held) == 1 else held,
            }
        )
    return rows


def table(workers: list[dict[str, Any]]) -> str:
    """The workers in rows, columns aligned."""
    rows = [("worker", "stages", "busy", "", "activations held", "weight versions")]
    for worker, facts in enumerate(workers):
        versions = facts["weight_versions"]
        rows.append(
            (
                str(worker),
                " ".join(map(str, facts["stages"])),
                f"{facts['busy']:g}",
                f"{facts['busy_share']:.1%}",
                str(facts["peak_activations"]),
                " ".join(map(str, versions if isinstance(versions, list) else [versions])),
            )
        )
    return aligned(rows)


def drawing(timeline: "Timeline", latency: float) -> str:
    """The schedule in characters, where its times have a common measure that leaves it readable."""
    from stretto.schedule import draw

    lengths = sorted({span.end - span.start for span in timeline.spans} | {latency})
    near = [Fraction(length).limit_denominator(1000) for length in lengths]
    unit = common_measure(near)
    exact = all(math.isclose(a, b) for a, b in zip(lengths, near, strict=True))
    if not unit or not exact or timeline.makespan / unit > MOST_COLUMNS:
        return "(no common measure of these times is long enough for a drawing in characters: see --svg)"
    width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else 1000
    return f"{draw.text(timeline.spans, float(unit), width)}\n(one column is {float(unit):g})"


def common_measure(lengths: list[Fraction]) -> Fraction:
    """The longest time that all lengths are multiples of; 0 where all are 0."""
    common = math.lcm(*(length.denominator for length in lengths))
    return Fraction(math.gcd(*(int(length * common) for length in lengths)), common)
