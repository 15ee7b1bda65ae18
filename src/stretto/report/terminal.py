"""The table that the command line prints when a comparison ends; it fits 80 columns."""

import re
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY, own_metrics
from stretto.report.panel import Panel
from stretto.report.record import Record
from stretto.report.speedup import first_panel
from stretto.report.summary import MethodSummary, summarize
from stretto.report.verdict import sentences

Column = tuple[str, list[str]]  # its head, and a cell for each method
WIDTH = 80
MOST_OWN = 2  # of a user's metrics, so that the table fits


def table(records: Sequence[Record]) -> Table:
    """One row for each method, with the few figures that matter most, and the answer; the report has the rest."""
    summaries, panel = summarize(records), first_panel(records)
    built = Table(box=box.SIMPLE_HEAD, caption_justify="left", padding=0)
    built.add_column("method", overflow="fold")
    own = _own(summaries)
    columns = _fitting(summaries, own, _costs(summaries, panel))
    left = [name for name, column in own.items() if column not in columns]
    built.caption = _caption(summaries, panel, sentences(records)[0], left)
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


def _room(columns: Sequence[Column]) -> int:
    """The width that is left for the names of methods."""
    widths = [max(map(len, (*head.split("\n"), *cells))) for head, cells in columns]
    return WIDTH - sum(widths) - len(widths) - 2  # a space at both edges and between columns


def _costs(summaries: Sequence[MethodSummary], panel: Panel | None) -> list[Column]:
    """What each method's fastest run to the leading cut-off costs, or its best run where there is no cut-off."""
    if panel is None:
        costs = [(summary.serial_flops, summary.total_flops) for summary in summaries]
    else:
        fastest = [panel.fastest(summary.method) for summary in summaries]
        costs = [(None, None) if arrival is None else arrival.at.cost for arrival in fastest]
    return [
        ("serial\ncompute", [units.flops(serial) for serial, _ in costs]),
        ("total\ncompute", [units.flops(total) for _, total in costs]),
    ]


def _fitting(summaries: Sequence[MethodSummary], known: Mapping[str, Column], costs: Sequence[Column]) -> list[Column]:
    """The columns beside the names, with as many of the user's metrics as leave the names room."""
    own = [*known.values()][:MOST_OWN]
    longest = max((len(piece.rstrip()) for summary in summaries for piece in _pieces(summary.method)), default=0)
    judged = _judged(summaries)
    while own and _room([*judged, *own, *costs]) < longest:
        own = own[:-1]
    return [*judged, *own, *costs]


def _judged(summaries: Sequence[MethodSummary]) -> list[Column]:
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
    ]


def _own(summaries: Sequence[MethodSummary]) -> dict[str, Column]:
    """The user's metrics by name, on test data, or on validation data where there is no other."""
    chosen = [summary.chosen for summary in summaries]
    columns = {}
    for metric in own_metrics([run for run in chosen if run is not None]):
        tested = any(run is not None and metric.name in run.test_metrics for run in chosen)
        values = [
            None if run is None else (run.test_metrics if tested else run.metrics).get(metric.name) for run in chosen
        ]
        head = f"{'test' if tested else 'val.'}\n{metric.name}"
        columns[metric.name] = (head, [units.number(value) for value in values])
    return columns


def _caption(summaries: Sequence[MethodSummary], panel: Panel | None, answer: str, left: Sequence[str]) -> str:
    if not summaries:
        return "No runs."
    diverged, stuck = (sum(count) for count in zip(*((s.diverged, s.learned_nothing) for s in summaries), strict=True))
    failed = f"\nFailed: {diverged} diverged, {stuck} learned nothing." if stuck else ""
    chosen = f"the run with the best {summaries[0].metric.label}"
    others = f"\nNot in this table: {', '.join(left)}. The report and --json have all metrics." if left else ""
    told = f"Test and compute: {chosen}." if panel is None else f"Test: {chosen}.\nCompute: until {panel.goal}."
    return f"{answer}\n\n{told}\n± seeds: standard deviation over seeds at the best configuration.{failed}{others}"
