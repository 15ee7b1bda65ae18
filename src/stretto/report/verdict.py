"""The first paragraph of the report: results in plain words, with their figures.

It goes by what generalises: the metric on validation data by which runs are chosen. The answer at the leading cut-off
stands first, other cut-offs and what limits the answer follow.
"""

from collections.abc import Sequence

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY
from stretto.report.panel import Arrival, Panel, panels
from stretto.report.record import Record, methods
from stretto.report.speedup import Speedup, baseline, best_by_seed, fastest_rival, leading, speedups
from stretto.report.summary import MethodSummary, judge, summarize

MOST_NAMES = 4  # of methods in a sentence


def verdict(records: Sequence[Record]) -> str:
    """A few sentences on these runs; each names the cut-off and the costs that it rests on."""
    return " ".join(sentences(records))


def sentences(records: Sequence[Record]) -> list[str]:
    """The verdict: the answer at the leading cut-off first."""
    if not records:
        return ["No run has finished yet: there is nothing to compare."]
    if all(record.failed for record in records):
        return [_all_failed(records)]
    names, metric = methods(tuple(records)), judge(records)
    cutoffs = panels(records, metric)
    quality = _quality(summarize(records))
    if len(names) == 1:
        return [f"Only {names[0]} was run: there is nothing to compare it with.", quality]
    if not cutoffs and all(len(record.points) < 2 for record in records):
        return ["Each run was evaluated once: with --evaluations 2 or more their speed can be compared, too.", quality]
    if not cutoffs:
        return [f"No run improved on the {metric.label} it began with.", quality]
    compared = _without_baseline if baseline(names) is None else _against_baseline
    answer, further = compared(cutoffs, names, _swept(records))
    return [*answer, quality, *further, *_limits(cutoffs, names)]


def _swept(records: Sequence[Record]) -> list[str]:
    """The options that differ between runs."""
    names = dict.fromkeys(name for record in records for name in record.options)
    return [name for name in names if len({str(record.options.get(name)) for record in records}) > 1]


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


def _against_baseline(
    cutoffs: Sequence[Panel], names: Sequence[str], swept: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The answer at the leading cut-off, and those at the others."""
    reference, label = str(baseline(names)), cutoffs[0].metric.label
    found = [(panel, rival) for panel in cutoffs if (rival := fastest_rival(panel, names)) is not None]
    if not any(panel.fastest(name) for panel in cutoffs for name in names if name != reference):
        return [f"No method but {reference} reaches any {label} compared."], []
    if not any(panel.fastest(reference) for panel in cutoffs):
        return [], []  # the limits say so
    if not any(_is_faster(rival) for _, rival in found):
        return [f"At no {label} compared is any method more than 5 % faster than {reference}."], []
    first = leading([panel for panel, _ in found], names)
    answer = [text for panel, rival in found if panel is first for text in _faster(panel, rival, names, swept)]
    others = [_in_short(panel, rival) for panel, rival in found if panel is not first]
    return answer, [f"At other cut-offs: {'; '.join(others)}."] if others else []


def _is_faster(rival: Speedup) -> bool:
    return (rival.serial or 0.0) > 1.05


def _faster(panel: Panel, rival: Speedup, names: Sequence[str], swept: Sequence[str]) -> list[str]:
    """The fastest method at a cut-off against the baseline, then the other methods there."""
    reference, total = str(baseline(names)), rival.total or 1.0
    if not _is_faster(rival):
        return [f"{_place(panel)} no method is more than 5 % faster than {reference}."]
    cost = "the same total compute" if 0.95 <= total <= 1.05 else f"{units.times(total)} the total compute"
    range_of_cost = f" ({rival.total_spread})" if rival.total_spread else ""
    doubts = "".join(f", in a run that {later}" for later in _lost(panel, rival.method))
    doubts += "".join(f"; a run of {reference} {later}" for later in _lost(panel, reference))
    answer = (
        f"{_place(panel)}, {rival.method}{_at(rival.arrival, swept)} needs {_ratio(rival)} less serial compute than "
        f"{reference}{_at(panel.fastest(reference), swept)} ({rival.spread}), for {cost}{range_of_cost}{doubts}."
    )
    others = [
        entry for entry in speedups(panel, names) if entry.serial and entry.method not in (reference, rival.method)
    ]
    return [answer, *_others(panel, others, swept)]


def _others(panel: Panel, others: Sequence[Speedup], swept: Sequence[str]) -> list[str]:
    """The other methods at a cut-off, the fastest first."""
    told = [
        f"{entry.method} with {_ratio(entry)}{_doubts(panel, entry, _options(entry.arrival, swept))}"
        for entry in sorted(others, key=lambda entry: -(entry.serial or 0.0))
    ]
    if len(told) > MOST_NAMES:
        told[MOST_NAMES:] = [f"{len(told) - MOST_NAMES} that are slower"]
    return [f"Then {'comes' if len(told) == 1 else 'come'} {_listed(told)}."] if told else []


def _in_short(panel: Panel, rival: Speedup) -> str:
    """The fastest method at a cut-off, as a part of a sentence."""
    if not _is_faster(rival):
        return f"{_value(panel)}, none more than 5 % faster"
    return f"{_value(panel)}, {rival.method} {_ratio(rival)}{_doubts(panel, rival)}"


def _doubts(panel: Panel, entry: Speedup, options: str = "") -> str:
    """How sure a ratio is: a run's options, the range over seeds, and what became of its runs."""
    return f" ({', '.join([*([options] if options else []), entry.spread, *_lost(panel, entry.method)])})"


def _lost(panel: Panel, method: str) -> list[str]:
    """What became of a method's runs to the cut-off, each seed's fastest, that failed later."""
    runs = best_by_seed(panel, method, lambda arrival: arrival.at.cost).values()
    return sorted({run.lost_later for run in runs} - {""})


def _at(arrival: Arrival | None, swept: Sequence[str]) -> str:
    """The swept options of a run, behind its method."""
    options = _options(arrival, swept)
    return f" at {options}" if options else ""


def _options(arrival: Arrival | None, swept: Sequence[str]) -> str:
    options = {} if arrival is None else arrival.record.options
    return ", ".join(f"{name} {options[name]}" for name in swept if name in options)


def _ratio(entry: Speedup) -> str:
    return units.times(entry.serial).replace(".0×", "×")


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


def _without_baseline(
    cutoffs: Sequence[Panel], names: Sequence[str], swept: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The fastest method at the leading cut-off, and why it is compared with no other."""
    panel = leading(cutoffs, names)
    fastest = min((a for name in names if (a := panel.fastest(name))), key=lambda a: a.at.serial_flops)
    doubts = "".join(f", in a run that {later}" for later in _lost(panel, fastest.record.method))
    answer = (
        f"{_place(panel)}, {fastest.record.method}{_at(fastest, swept)} is fastest: "
        f"{units.flops(fastest.at.serial_flops)} of serial compute, {units.flops(fastest.at.total_flops)} in total"
        f"{doubts}."
    )
    return [answer], [f"Backprop is not among the methods, so no {panel.metric.label} is measured against it."]


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
