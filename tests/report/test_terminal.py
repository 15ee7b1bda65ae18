import io

from rich.console import Console

from stretto.report import summarize
from stretto.report.terminal import table

from .synthetic import make_records, run


def shown(records) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(summarize(records)))
    return console.export_text()


def test_a_row_a_method(records):
    text = shown(records)
    for word in ("overlapping", "chunked(chunks=2)", "97.2 %", "GFLOP", "0.000803"):
        assert word in text


def test_nothing_is_cut_at_80_columns(records):
    assert "…" not in shown(records)
    assert max(len(line) for line in shown(records).splitlines()) <= 80


def test_translations_are_shown_by_their_bleu(records):
    best = max(record.test_bleu for record in records if record.test_bleu and record.method == "backprop")
    assert "BLEU" in shown(records)
    assert f"{best:.1f}" in shown(records)
    assert "BLEU" not in shown(make_records(("pb",), accuracy=False))


def test_losses_are_shown_where_there_is_no_accuracy():
    assert "acc." not in shown(make_records(("pb",), accuracy=False))
    assert "No runs" in shown([])


def test_names_are_text_and_not_markup():
    assert "[red]x" in shown([run([1.0], method="[red]x")])
