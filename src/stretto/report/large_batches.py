"""What batch size does, where several were run: utilisation, accuracy, sharpness, noise, steps against examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import altair as alt

from stretto.analysis.batch_tradeoff import Tradeoff, fit, positive_weights
from stretto.report import units
from stretto.report.charts import large_batches as charts
from stretto.report.frontier import first_reaching
from stretto.report.metric import TRAIN_LOSS, Metric
from stretto.report.palette import Style
from stretto.report.panel import panels
from stretto.report.record import Measurement, Record, methods
from stretto.report.summary import best_configuration, judge

RATE, BATCH = "lr", "batch_size"
Place = Callable[[str, alt.LayerChart | None], str | None]


@dataclass(frozen=True)
class AtBatch:
    """A method at one batch size.

    `tuned` are the runs of its best configuration there, one a seed, by validation; `fixed` those at the rate that is
    best at the smallest batch size. `seconds` is the median time of a step.
    """

    method: str
    batch: int
    tuned: tuple[Record, ...]
    fixed: tuple[Record, ...]
    seconds: float | None
    flops: float  # of a step

    @property
    def examples_per_second(self) -> float | None:
        """Throughput."""
        return self.batch / self.seconds if self.seconds else None


@dataclass(frozen=True)
class StepTime:
    """`fixed + batch * each` seconds a step: what does not depend on the batch, and what an example adds."""

    fixed: float
    each: float

    def utilisation(self, batch: float) -> float:
        """The share of the throughput of an endless batch, `b / (b + fixed / each)`."""
        return batch / (batch + self.fixed / self.each)


def at_batches(records: Sequence[Record]) -> tuple[AtBatch, ...]:
    """Every method at every batch size, in the order of the methods; none where there is one batch size only."""
    usable = [record for record in records if isinstance(record.options.get(BATCH), int)]
    if len({record.options[BATCH] for record in usable}) < 2:
        return ()
    metric = judge(records)
    return tuple(
        each
        for method in methods(tuple(usable))
        for each in _of_method([record for record in usable if record.method == method], metric)
    )


def _of_method(records: Sequence[Record], metric: Metric) -> list[AtBatch]:
    found: list[AtBatch] = []
    rate: Any = None
    for batch in sorted({record.options[BATCH] for record in records}):
        own = [record for record in records if record.options[BATCH] == batch]
        tuned = best_configuration(own, metric)
        if rate is None and tuned:
            rate = tuned[0].options.get(RATE)
        fixed = tuple(each for each in own if each.options.get(RATE) == rate and not each.diverged)
        times = [each.seconds_per_step for each in own if each.seconds_per_step]
        flops = max((last.total_flops / last.step for each in own for last in each.points[-1:]), default=0.0)
        found.append(AtBatch(own[0].method, batch, tuned, fixed, median(times) if times else None, flops))
    return found


def step_time(seen: Sequence[AtBatch]) -> StepTime | None:
    """The line through a method's step times, its error in parts of each least; None where it is no such line."""
    found = positive_weights([(1 / each.seconds, each.batch / each.seconds) for each in seen if each.seconds])
    return None if found is None else StepTime(*found)


def arrivals(records: Sequence[Record]) -> tuple[float, dict[str, dict[int, tuple[float, float]]]] | None:
    """The hardest cut-off of the train loss that most methods and batch sizes reach, and at each the fewest steps.

    As {method: {batch: (steps, examples)}}.
    """
    best: tuple[float, dict[str, dict[int, tuple[float, float]]]] | None = None
    for panel in reversed(panels(records, TRAIN_LOSS)):
        found: dict[str, dict[int, tuple[float, float]]] = {}
        for record in records:
            point = first_reaching(record, TRAIN_LOSS, panel.cutoff)
            batch = record.options.get(BATCH)
            if point is not None and isinstance(batch, int):
                own = found.setdefault(record.method, {})
                own[batch] = min((float(point.step), float(point.examples)), own.get(batch, (math.inf, math.inf)))
        if best is None or _count(found) > _count(best[1]):
            best = panel.cutoff, found
    return best if best is not None and any(len(own) > 1 for own in best[1].values()) else None


def _count(found: Mapping[str, Mapping[int, Any]]) -> int:
    return sum(map(len, found.values()))


def noise_of(runs: Sequence[Record], part: float) -> float | None:
    """The noise scale so far into the runs (1: their end): averages over seeds, one divided by the other."""
    seen = [each for run in runs if (each := measured(run, part)) is not None]
    pairs = [(m.noise_trace, m.gradient_square) for m in seen]
    whole = [(trace, square) for trace, square in pairs if trace is not None and square is not None]
    square = fmean(square for _, square in whole) if whole else 0.0
    return fmean(trace for trace, _ in whole) / square if square > 0 else None


def measured(run: Record, part: float) -> Measurement | None:
    """What was measured so far into a run; None if nothing was, or it did not get there."""
    if not run.measurements or run.diverged:
        return None
    last = run.measurements[-1].step
    return min(run.measurements, key=lambda each: abs(each.step - part * last))


def sharpness_of(runs: Sequence[Record]) -> list[float]:
    """At the end of each run."""
    found = [each.sharpness for run in runs if (each := measured(run, 1)) is not None]
    return [value for value in found if value is not None]


def large_batches(records: Sequence[Record], styles: Mapping[str, Style], place: Place) -> dict[str, Any] | None:
    """All that the section says; None where one batch size was run."""
    seen = at_batches(records)
    if not seen:
        return None
    lines = {name: step_time([each for each in seen if each.method == name]) for name in styles}
    reached = arrivals(records)
    curves = {} if reached is None else {name: fit(list(own.values())) for name, own in reached[1].items()}
    return {
        "utilisation": place("batch-utilisation", charts.utilisation_chart(seen, lines, styles)),
        "relative": any(line is None for line in lines.values()),
        "accuracy": place("batch-accuracy", charts.quality_chart(seen, styles)),
        "sharpness": place("batch-sharpness", charts.sharpness_chart(seen, styles, sharpness_of)),
        "noise": place("batch-noise", charts.noise_chart(seen, styles, noise_of)),
        "tradeoff": None
        if reached is None
        else place("batch-tradeoff", charts.tradeoff_chart(reached[1], curves, styles)),
        "goal": "" if reached is None else units.cutoff(reached[0], False),
        "critical": [_critical(name, curve) for name, curve in curves.items()],
    }


def _critical(method: str, curve: Tradeoff | None) -> str:
    if curve is None:
        return f"{method}: its runs do not bend so"
    least = f"at least {units.number(curve.min_steps)} steps and {units.number(curve.min_examples)} examples"
    return f"{method}: critical batch {units.number(curve.critical_batch)}, {least}"
