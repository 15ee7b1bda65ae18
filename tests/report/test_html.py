"""The page: complete, offline, safe, and whole for every odd study."""

import json
import os
import re
import subprocess
import sys
from functools import cache

import pytest

from pairwise import slow_where
from stretto.errors import UsageError
from stretto.report import build
from stretto.report.html import _bundle, flags, render

from .synthetic import make_page, make_records, make_run, run


def charts_of(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)

    def refuse(word):
        raise AssertionError(f"{word} in JSON")

    return json.loads(found, parse_constant=refuse)


def without_bundle(text: str) -> str:
    return re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def test_every_chart_has_a_place_and_its_data(page):
    found = charts_of(page)
    places = re.findall(r'<div class="chart" id="([^"]+)">', page)
    assert sorted(places) == sorted(found["charts"])
    assert (
        len(places) == 1 + 20 + 6 + 4 + 2
    )  # the first frontier, frontiers, curves, tuning, batch size: nothing was timed or measured
    used = set(re.findall(r'"data": {"name": "([^"]+)"', json.dumps(found["charts"])))
    assert used == set(found["datasets"])


def test_nothing_is_loaded(page):
    assert not re.search(r"""(src|href|action)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"<link|<img|<iframe|@import|url\(\s*['\"]?http", without_bundle(page))
    assert "default-src 'none'" in page


def test_a_page_with_charts_holds_the_program_that_draws_them(monkeypatch):
    """Once, of the version that altair writes for; here the program is a word."""
    import altair
    import vl_convert

    def bundle(vl_version):
        return f"// Vega-Lite {vl_version}"

    monkeypatch.setattr("stretto.report.html._bundle", _bundle.__wrapped__)
    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    (program,) = re.findall(r"// Vega-Lite [\d.]+", render(make_page((run([2.0, 1.0]),))))
    assert altair.SCHEMA_VERSION.startswith(program.replace("// Vega-Lite ", "v"))
    assert program.split()[-1] in vl_convert.get_vegalite_versions()
    assert "// Vega-Lite" not in render(make_page(()))


@pytest.mark.slow
def test_nothing_is_loaded_by_a_page_with_the_program_that_draws_it(records, monkeypatch):
    monkeypatch.setattr("stretto.report.html._bundle", _bundle)
    page = render(make_page(records))
    assert len(page) > 700_000
    test_nothing_is_loaded(page)
    assert len(page) < 1_550_000


def test_the_page_says_what_was_run(page):
    for text in (
        "At validation accuracy 96 %, overlapping at lr 1.0, batch_size 128 needs 2.1× less serial compute",
        "MLP, 8 layers of 256 units",
        "96; 20 diverged",
        "lr 0.03, 0.1, 0.3, 1.0; batch_size 32, 128",
        "Not reached by greedy, overlapping",
        "not reached",
        "train loss ≤ 0.001",
        "validation accuracy ≥ 96 %",
        "Validation BLEU",
        "validation BLEU ≥ 85",
        "<th>test BLEU</th>",
        "torch 2.13.0",
        "stretto compare --model mlp",
        "[model]",
        "The paper&#39;s heads could not be retrieved",
        "All 96 runs",
        "diverged at",
        "<rect",
    ):
        assert text in page, text


def test_a_single_run_begins_with_its_curves_and_its_speed(tmp_path):
    page = make_page((make_run("overlapping", 0.1, 32, 0),))
    path = build(page, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == [path]  # a picture of one point says nothing
    text = path.read_text()
    assert re.findall(r'<section id="(\w+)">', text)[:3] == ["run", "schedules", "about"]
    assert re.findall(r'class="chart" id="([^"]+)"', text)[:3] == ["curve-train-step", "curve-validation-step", "speed"]
    assert not re.search(r'<section id="(frontiers?|tuning)"', text)
    assert '<p class="verdict">The best validation accuracy' in text
    found = charts_of(text)
    speed = found["datasets"][found["charts"]["speed"]["data"]["name"]]
    assert {row["speed"] for row in speed} == {8000}
    assert "<dt>Examples a second</dt><dd>8000</dd>" in text


def test_flags_stay_on_one_line():
    assert flags("a < b: --measure x") == "a &lt; b: <code>--measure</code> x"


def test_diverged_runs_are_all_listed(page, records):
    table = page.split('<section id="failed">')[1].split("</section>")[0]
    assert table.count("<tr><td>") == sum(record.diverged for record in records)


FEW = {"rates": (0.1, 0.3), "batches": (32,), "seeds": (0,)}
ODD = {  # the runs of a study, made when they are wanted
    "one method": lambda: make_records(("overlapping",), **FEW),
    "one run": lambda: make_records(("backprop",), rates=(0.1,), batches=(32,), seeds=(0,)),
    "no backprop": lambda: make_records(("greedy", "overlapping"), **FEW),
    "all diverged": lambda: tuple(run([2.0, 9.0], seed=s, status="diverged", diverged_at=3) for s in range(3)),
    "diverged at once": lambda: (run(status="diverged", diverged_at=1),),
    "no runs": lambda: (),
    "regression": lambda: make_records(accuracy=False, **FEW),
    "negative losses": lambda: (run([1.0, -1.0]), run([1.0, -2.0], method="greedy")),
    "zero loss": lambda: (run([1.0, 0.0]), run([1.0, 0.5], method="greedy")),
    "no evaluations": lambda: (run(status="finished"),),
    "no options": lambda: (run([1.0, 0.5], options={}),),
    "no cost": lambda: (run([1.0, 0.5], costs=[(0.0, 0.0), (0.0, 0.0)]),),
    "no progress": lambda: (run([1.0, 1.0]), run([1.0, 1.0], method="greedy")),
    "huge losses": lambda: (run([1e30, 1e25], options={"lr": 1e-9}),),
}


@cache
def odd(name):
    return render(make_page(ODD[name](), planned=50, versions={}, settings={}, pictures={}, command=""))


@pytest.mark.parametrize("name", slow_where("one run".__eq__, ODD))
def test_odd_studies(name):
    text = odd(name)
    charts_of(text)
    assert "</html>" in text
    assert f"{len(ODD[name]())} of 50" in text


def test_odd_studies_say_so():
    assert "No run has finished yet" in odd("no runs")
    assert "All 3 runs diverged" in odd("all diverged")
    assert "Without backprop among the methods" in odd("no backprop")
    assert "n/a" in odd("one method")
    assert "validation accuracy" not in odd("regression").split("<section id=")[1]
    assert "BLEU" not in odd("regression")


def test_batch_norms_in_parts_are_a_fact_of_the_page(records):
    said = "gpipe: batch norms normalise each part"
    assert said in render(make_page(records, norms_note=said))
    assert "Batch norms" not in render(make_page(records))


def test_text_is_escaped():
    evil = "<script>alert(1)</script>"
    records = tuple(run([2.0, 1.0, 0.5], method=m, options={"lr": 0.1, evil: evil}) for m in (evil, "backprop"))
    changes = {"dataset": evil, "model": evil, "heads_note": evil, "settings": {evil: evil}, "versions": {evil: evil}}
    text = render(make_page(records, title=evil, accounting_note=evil, command=evil, pictures={}, **changes))
    assert evil not in text
    assert text.count("<script") == 3
    found = json.dumps(charts_of(text))
    assert evil in found, "the charts hold the name as it is, escaped as JSON only"


def test_a_bad_picture_leaves_no_file(tmp_path):
    with pytest.raises(UsageError, match="schedule picture"):
        build(make_page((), pictures={"pb": "<svg><script/></svg>"}), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        build(make_page(()), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_importing_the_package_is_cheap():
    slow = ("altair", "jinja2", "vl_convert", "rich", "numpy")
    code = f"import sys, stretto.report; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
