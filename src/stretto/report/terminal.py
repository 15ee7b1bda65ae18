"""The table that the command line prints when a comparison ends; it fits 80 columns."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY
from stretto.report.summary import MethodSummary


def table(summaries: Sequence[MethodSummary]) -> Table:
    """One row for each method, with the few figures that matter most; the report has the rest."""
    built = Table(
        box=box.SIMPLE_HEAD,
        caption=_caption(summaries),
        caption_justify="left",
        padding=0,
    )
    built.add_column("method", overflow="fold")
    columns = _columns(summaries)
    for head, _ in columns:
        built.add_column(head, justify="right", no_wrap=True)
    for index, summary in enumerate(summaries):
        built.add_row(Text(summary.method), *(Text(cells[index]) for _, cells in columns))
    return built


def _columns(summaries: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    if not summaries:
        return []
    if summaries[0].metric is VALIDATION_ACCURACY:
        judged = [
            ("val.\nacc.", [units.percent(each.best_validation_accuracy) for each in summaries]),
            ("test\nacc.", [units.percent(each.test_accuracy) for each in summaries]),
            ("±\nseeds", [units.percent(each.spread, 2) for each in summaries]),
        ]
    else:
        judged = [
            ("val.\nloss", [units.number(each.best_validation_loss) for each in summaries]),
            ("test\nloss", [units.number(each.test_loss) for each in summaries]),
            ("±\nseeds", [units.number(each.spread) for each in summaries]),
        ]
    if any(each.test_bleu is not None for each in summaries):  # what translations are published with
        judged[1] = ("test\nBLEU", [units.bleu(each.test_bleu) for each in summaries])
    return [
        ("di-\nverged", [f"{each.diverged}/{each.runs}" for each in summaries]),
        ("train\nloss", [units.number(each.best_train_loss) for each in summaries]),
        *judged,
        ("serial\ncompute", [units.flops(each.serial_flops) for each in summaries]),
        ("total\ncompute", [units.flops(each.total_flops) for each in summaries]),
    ]


def _caption(summaries: Sequence[MethodSummary]) -> str:
    if not summaries:
        return "No runs."
    return (
        f"Test and compute are those of the run with the best {summaries[0].metric.label}.\n"
        "± seeds: standard deviation over seeds at the best configuration."
    )
