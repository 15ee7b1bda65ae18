"""The first paragraph of the report: results in plain words, with their figures.

It goes by what generalises: the metric on validation data by which runs are chosen.
"""

from collections.abc import Sequence

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY, Metric
from stretto.report.panel import Panel, panels
from stretto.report.record import Record, methods
from stretto.report.speedup import Speedup, baseline, speedups
from stretto.report.summary import MethodSummary, judge, summarize

MOST_NAMES = 4  # of methods in a sentence


def verdict(records: Sequence[Record]) -> str:
    """A few sentences on these runs; each names the cut-off and the costs that it rests on."""
    return " ".join(sentences(records))


def sentences(records: Sequence[Record]) -> list[str]:
    """The verdict, the sentence on what generalises best first."""
    if not records:
        return ["No run has finished yet: there is nothing to compare."]
    if all(record.failed for record in records):
        return [_all_failed(records)]
    names, metric = methods(tuple(records)), judge(records)
    cutoffs = panels(records, metric)
    quality = _quality(summarize(records))
    if len(names) == 1:
        return [f"Only {names[0]} was run: there is nothing to compare it with.", quality]
    if not cutoffs:
        return [f"No run improved on the {metric.label} it began with.", quality]
    compared = _without_baseline if baseline(names) is None else _against_baseline
    return [quality, *compared(cutoffs, names, metric)]


def _all_failed(records: Sequence[Record]) -> str:
    count = "The only run" if len(records) == 1 else f"All {len(records)} runs"
    remedy = "Lower the learning rate, or clip the gradients."
    if all(record.diverged for record in records):
        return f"{count} diverged: there is nothing to compare. {remedy}"
    if not any(record.diverged for record in records):
        end = "its end" if len(records) == 1 else "their end"
        return (
            f"{count} learned nothing, being no better on validation data at {end} than at the first evaluation: "
            "there is nothing to compare. Change the learning rate, or train for longer."
        )
    diverged = sum(record.diverged for record in records)
    return f"{count} failed: {diverged} diverged, {len(records) - diverged} learned nothing. {remedy}"


def _against_baseline(cutoffs: Sequence[Panel], names: Sequence[str], metric: Metric) -> list[str]:
    reference = str(baseline(names))
    compared = [(panel, best) for panel in cutoffs if (best := _best(panel, names)) is not None]
    if not any(panel.fastest(name) for panel in cutoffs for name in names if name != reference):
        return [f"No method but {reference} reaches any {metric.label} compared."]
    if not any(panel.fastest(reference) for panel in cutoffs):
        told = []  # the limits say so
    elif not any(best.serial and best.serial > 1.05 for _, best in compared):
        told = [f"At no {metric.label} compared is any method more than 5 % faster than {reference}."]
    else:
        told = [_faster(panel, best, reference) for panel, best in _ends(compared)]
    return [*told, *_limits(cutoffs, names)]


def _ends(compared: Sequence[tuple[Panel, Speedup]]) -> list[tuple[Panel, Speedup]]:
    """The easiest and the hardest comparison; the only one if there is one."""
    return [compared[0]] if len(compared) == 1 else [compared[0], compared[-1]]


def _best(panel: Panel, names: Sequence[str]) -> Speedup | None:
    reference = baseline(names)
    others = [
        speedup for speedup in speedups(panel, names) if speedup.method != reference and speedup.serial is not None
    ]
    return max(others, key=lambda speedup: speedup.serial or 0.0, default=None)


def _faster(panel: Panel, best: Speedup, reference: str) -> str:
    serial, total = best.serial or 1.0, best.total or 1.0
    if serial <= 1.05:
        return f"{_place(panel)} no method is more than 5 % faster than {reference}."
    cost = "the same total compute" if 0.95 <= total <= 1.05 else f"{units.times(total)} the total compute"
    range_of_cost = f" ({best.total_spread})" if best.total_spread else ""
    ratio = units.times(serial).replace(".0×", "×")
    later = f", in a run that {best.arrival.lost_later}" if best.arrival and best.arrival.lost_later else ""
    return (
        f"{_place(panel)}, {best.method} needs {ratio} less serial compute than {reference} ({best.spread}), "
        f"for {cost}{range_of_cost}{later}."
    )


def _place(panel: Panel) -> str:
    """The cut-off at the beginning of a sentence."""
    return f"At {panel.metric.label} {_value(panel)}"


def _value(panel: Panel) -> str:
    return units.cutoff(panel.cutoff, panel.metric.is_share)


def _limits(cutoffs: Sequence[Panel], names: Sequence[str]) -> list[str]:
    """A sentence for each set of methods that alone reach some cut-offs: one method, or several without backprop."""
    reference = baseline(names)
    alone: dict[tuple[str, ...], list[Panel]] = {}
    for panel in cutoffs:
        here = tuple(name for name in names if name not in panel.missing)
        if len(here) == 1 or (here and reference in panel.missing):
            alone.setdefault(here, []).append(panel)
    return [_only(here, found, names) for here, found in alone.items()]


def _only(here: tuple[str, ...], found: Sequence[Panel], names: Sequence[str]) -> str:
    values = _listed([_value(panel) for panel in found])
    rest = [name for name in names if name not in here]
    others = f"{_listed(rest)} {'does' if len(rest) == 1 else 'do'} not"
    if len(rest) > MOST_NAMES:
        others = f"none of the other {len(rest)} methods does"
    who = f"only {here[0]} gets there" if len(here) == 1 else f"{_listed(here)} get there"
    return f"At {found[0].metric.label} {values}, {who}: {others}."


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _without_baseline(cutoffs: Sequence[Panel], names: Sequence[str], metric: Metric) -> list[str]:
    reached = [panel for panel in cutoffs if len(names) - len(panel.missing) > 1] or list(cutoffs)
    panel = reached[-1]
    fastest = min((a for name in names if (a := panel.fastest(name))), key=lambda a: a.at.serial_flops)
    later = f", in a run that {fastest.lost_later}" if fastest.lost_later else ""
    return [
        f"Backprop is not among the methods, so no {metric.label} is measured against it.",
        f"{_place(panel)}, {fastest.record.method} is fastest: {units.flops(fastest.at.serial_flops)} of serial "
        f"compute, {units.flops(fastest.at.total_flops)} in total{later}.",
        *_limits(cutoffs, names),
    ]


def _quality(summaries: Sequence[MethodSummary]) -> str:
    scored = [
        (value, summary)
        for summary in summaries
        if summary.chosen and (value := summary.metric.final(summary.chosen)) is not None
    ]
    if not scored:
        return "No finished run has a validation value."
    ranked = sorted(scored, key=lambda item: item[1].metric.cost(item[0]))
    is_accuracy = scored[0][1].metric is VALIDATION_ACCURACY
    form = units.percent if is_accuracy else units.number
    value, best = ranked[0]
    test = best.test_accuracy if is_accuracy else best.test_loss
    tested = "" if test is None else f" ({form(test)} on test data)"
    text = f"The best {best.metric.label} at the end of a run is {form(value)}{tested}, by {best.method}"
    if len(ranked) == 1:
        return f"{text}."
    reached, second = ranked[1]
    if form(reached) == form(value):
        return f"{text}; {second.method} reaches the same."
    spread = max(best.spread or 0.0, second.spread or 0.0)
    close = ", which is within the spread over seeds" if abs(value - reached) <= spread else ""
    return f"{text}; {second.method} follows with {form(reached)}{close}."
