"""The first paragraph of the report: results in plain words, with their figures."""

from collections.abc import Sequence

from stretto.report import units
from stretto.report.metric import TRAIN_LOSS, VALIDATION_ACCURACY
from stretto.report.panel import Panel, panels
from stretto.report.record import Record, methods
from stretto.report.speedup import Speedup, baseline, speedups
from stretto.report.summary import MethodSummary, summarize


def verdict(records: Sequence[Record]) -> str:
    """A few sentences on these runs; each names the cut-off and the costs that it rests on."""
    if not records:
        return "No run has finished yet: there is nothing to compare."
    if all(record.diverged for record in records):
        count = "The only run" if len(records) == 1 else f"All {len(records)} runs"
        return f"{count} diverged: there is nothing to compare. Lower the learning rate, or clip the gradients."
    names = methods(tuple(records))
    cutoffs = panels(records, TRAIN_LOSS)
    sentences = [_quality(summarize(records))]
    if len(names) == 1:
        sentences.insert(0, f"Only {names[0]} was run: there is nothing to compare it with.")
    elif not cutoffs:
        sentences.insert(0, "No run improved on the loss it began with.")
    elif baseline(names) is None:
        sentences.insert(0, _without_baseline(cutoffs, names))
    else:
        sentences.insert(0, _against_baseline(cutoffs, names))
    return " ".join(sentences)


def _against_baseline(cutoffs: Sequence[Panel], names: Sequence[str]) -> str:
    reference = baseline(names)
    compared = [(panel, best) for panel in cutoffs if (best := _best(panel, names)) is not None]
    sentences: list[str] = []
    if not any(panel.fastest(name) for panel in cutoffs for name in names if name != reference):
        sentences.append(f"No method but {reference} reaches any of the train losses compared.")
    elif not compared:
        sentences.append(f"{reference} reaches none of the train losses compared.")
    elif not any(best.serial and best.serial > 1.05 for _, best in compared):
        sentences.append(f"At no train loss compared is any method more than 5 % faster than {reference}.")
    else:
        sentences += [_faster(panel, best, str(reference)) for panel, best in _ends(compared)]
    sentences += _limits(cutoffs, names)
    return " ".join(sentences)


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
    place = f"At train loss {units.cutoff(panel.cutoff, False)}"
    serial, total = best.serial or 1.0, best.total or 1.0
    if serial <= 1.05:
        return f"{place} no method is more than 5 % faster than {reference}."
    cost = "the same total compute" if 0.95 <= total <= 1.05 else f"{units.times(total)} the total compute"
    ratio = units.times(serial).replace(".0×", "×")
    later = " (in a run that diverged later)" if best.arrival and best.arrival.record.diverged else ""
    return f"{place}, {best.method} needs {ratio} less serial compute than {reference}, for {cost}{later}."


def _limits(cutoffs: Sequence[Panel], names: Sequence[str]) -> list[str]:
    """A sentence on the cut-off from which on only one method gets there, if there is such a cut-off."""
    for panel in cutoffs:
        left = [name for name in names if name not in panel.missing]
        if len(left) == 1 and len(names) > 1:
            tail = " and below" if panel is not cutoffs[-1] else ""
            return [f"Train loss {units.cutoff(panel.cutoff, False)}{tail} is reached by {left[0]} only."]
    return []


def _without_baseline(cutoffs: Sequence[Panel], names: Sequence[str]) -> str:
    sentences = ["Backprop is not among the methods, so nothing is measured against it."]
    reached = [panel for panel in cutoffs if len(names) - len(panel.missing) > 1] or list(cutoffs)
    panel = reached[-1]
    fastest = min((a for name in names if (a := panel.fastest(name))), key=lambda a: a.point.serial_flops)
    sentences.append(
        f"At train loss {units.cutoff(panel.cutoff, False)}, {fastest.record.method} is fastest: "
        f"{units.flops(fastest.point.serial_flops)} of serial compute, "
        f"{units.flops(fastest.point.total_flops)} in total."
    )
    return " ".join(sentences + _limits(cutoffs, names))


def _quality(summaries: Sequence[MethodSummary]) -> str:
    scored = [
        (value, summary)
        for summary in summaries
        if summary.chosen and (value := summary.metric.final(summary.chosen)) is not None
    ]
    if not scored:
        return "No finished run has a validation value."
    is_accuracy = scored[0][1].metric is VALIDATION_ACCURACY
    ranked = sorted(scored, key=lambda item: item[1].metric.cost(item[0]))

    def score(item: tuple[float, MethodSummary]) -> str:
        return units.percent(item[0]) if is_accuracy else units.number(item[0])

    best = ranked[0]
    test = best[1].test_accuracy if is_accuracy else best[1].test_loss
    tested = "" if test is None else f" ({units.percent(test) if is_accuracy else units.number(test)} on test data)"
    text = f"The best {best[1].metric.label} is {score(best)}{tested}, by {best[1].method}"
    if len(ranked) == 1:
        return f"{text}."
    second, reached = ranked[1][1].method, score(ranked[1])
    return f"{text}; {second} {'reaches the same' if reached == score(best) else f'follows with {reached}'}."
