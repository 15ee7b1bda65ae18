import io
from dataclasses import replace

from rich.console import Console

from stretto.report.terminal import broken, table

from .synthetic import make_records, run


def shown(records) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(records))
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


LONG = "chunked(chunks=2, head=two-layer(width=64))"


def test_names_are_broken_behind_commas_and_brackets():
    assert broken(LONG, 80) == LONG
    assert broken(LONG, 20) == "chunked(chunks=2,\nhead=two-layer(\nwidth=64))"
    assert broken(LONG, 11) == "chunked(\nchunks=2,\nhead=two-layer(\nwidth=64))"
    assert broken("pb", 1) == "pb"
    assert [broken(text, 80) for text in ("f((x", "f(,)", "")] == ["f((x", "f(,)", ""]


def test_a_users_metrics_leave_names_their_room():
    metrics = {"mean_absolute": 0.25, "root_mean_square": 0.5}
    runs = [replace(run([1.0], method=LONG), metrics=metrics, test_metrics=metrics)]
    text = shown(runs)
    for piece in ("chunks=2", "head=two-layer(", "width=64))", "mean_absolute"):
        assert piece in text
    assert "Not in this table: root_mean_square. The report and --json have all metrics." in text.replace("\n", " ")
    assert max(len(line) for line in text.splitlines()) <= 80


def test_metrics_that_the_table_leaves_out_are_named():
    metrics = dict.fromkeys(("f1", "mae", "r2", "mape"), 0.25)
    text = shown([replace(run([1.0]), metrics=metrics)])
    head, _, caption = text.partition("backprop")
    assert "f1" in head
    assert "mae" in head
    assert "Not in this table: r2, mape." in caption
    assert "Not in this table" not in shown([replace(run([1.0]), metrics={"f1": 0.25, "mae": 0.5})])


def test_names_are_text_and_not_markup():
    assert "[red]x" in shown([run([1.0], method="[red]x")])
