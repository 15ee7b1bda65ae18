"""The table that the command line prints when a comparison ends; it fits 80 columns."""

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY, own_metrics
from stretto.report.summary import MethodSummary

WIDTH = 80
MOST_OWN = 2  # of a user's metrics, so that the table fits


def table(summaries: Sequence[MethodSummary]) -> Table:
    """One row for each method, with the few figures that matter most; the report has the rest."""
    built = Table(box=box.SIMPLE_HEAD, caption=_caption(summaries), caption_justify="left", padding=0)
    built.add_column("method", overflow="fold")
    columns = _fitting(summaries)
    for head, _ in columns:
        built.add_column(head, justify="right", no_wrap=True)
    for index, summary in enumerate(summaries):
        built.add_row(Text(broken(summary.method, _room(columns))), *(Text(cells[index]) for _, cells in columns))
    return built


def broken(method: str, width: int) -> str:
    """A method's name in lines of at most `width`, if they can end behind its commas and opening brackets."""
    lines = [""]
    for piece in _pieces(method):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _pieces(method: str) -> list[str]:
    return re.findall(r"[^,(]+(?:, *|\(|$)|[,(]", method)


def _room(columns: Sequence[tuple[str, list[str]]]) -> int:
    """The width that is left for the names of methods."""
    widths = [max(map(len, (*head.split("\n"), *cells))) for head, cells in columns]
    return WIDTH - sum(widths) - len(widths) - 2  # a space at both edges and between columns


def _fitting(summaries: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    """The columns beside the names, with as many of the user's metrics as leave the names room."""
    own = _own(summaries) if summaries else []
    longest = max((len(piece.rstrip()) for summary in summaries for piece in _pieces(summary.method)), default=0)
    while own and _room(_columns(summaries, own)) < longest:
        own = own[:-1]
    return _columns(summaries, own)


def _columns(summaries: Sequence[MethodSummary], own: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    if not summaries:
        return []
    if summaries[0].metric is VALIDATION_ACCURACY:
        judged = [
            ("val.\nacc.", [units.percent(summary.best_validation_accuracy) for summary in summaries]),
            ("test\nacc.", [units.percent(summary.test_accuracy) for summary in summaries]),
            ("±\nseeds", [units.percent(summary.spread, 2) for summary in summaries]),
        ]
    else:
        judged = [
            ("val.\nloss", [units.number(summary.best_validation_loss) for summary in summaries]),
            ("test\nloss", [units.number(summary.test_loss) for summary in summaries]),
            ("±\nseeds", [units.number(summary.spread) for summary in summaries]),
        ]
    if any(summary.test_bleu is not None for summary in summaries):  # what translations are published with
        judged[1] = ("test\nBLEU", [units.bleu(summary.test_bleu) for summary in summaries])
    head = "\nfailed" if any(summary.learned_nothing for summary in summaries) else "di-\nverged"
    return [
        (head, [f"{summary.failed}/{summary.runs}" for summary in summaries]),
        ("train\nloss", [units.number(summary.best_train_loss) for summary in summaries]),
        *judged,
        *own,
        ("serial\ncompute", [units.flops(summary.serial_flops) for summary in summaries]),
        ("total\ncompute", [units.flops(summary.total_flops) for summary in summaries]),
    ]


def _own(summaries: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    """The user's first metrics on test data, or on validation data where there is no other; the report has them all."""
    chosen = [summary.chosen for summary in summaries]
    columns = []
    for metric in own_metrics([run for run in chosen if run is not None])[:MOST_OWN]:
        tested = any(run is not None and metric.name in run.test_metrics for run in chosen)
        values = [
            None if run is None else (run.test_metrics if tested else run.metrics).get(metric.name) for run in chosen
        ]
        columns.append((f"{'test' if tested else 'val.'}\n{metric.name}", [units.number(value) for value in values]))
    return columns


def _caption(summaries: Sequence[MethodSummary]) -> str:
    if not summaries:
        return "No runs."
    diverged, stuck = (sum(count) for count in zip(*((s.diverged, s.learned_nothing) for s in summaries), strict=True))
    failed = f"\nFailed: {diverged} diverged, {stuck} learned nothing." if stuck else ""
    return (
        f"Test and compute are those of the run with the best {summaries[0].metric.label}.\n"
        "± seeds: standard deviation over seeds at the best configuration."
        f"{failed}"
    )
