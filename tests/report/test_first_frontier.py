"""One validation frontier stands first, everything else folds away; and the first one is a picture, too."""

import re
from xml.etree import ElementTree

import pytest

from stretto.report import build
from stretto.report.frontier import PNG, SVG, picture_spec, pictures
from stretto.report.speedup import first_panel

from .synthetic import make_page, make_records, run


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A page of a run of each method, with its pictures beside it; no test changes them."""
    few = make_records(rates=(0.1,), batches=(32,), seeds=(0,))
    return build(make_page(few), tmp_path_factory.mktemp("first") / "report.html")


@pytest.fixture(scope="module")
def page(built):
    return built.read_text(encoding="utf-8")


def test_it_is_the_hardest_cutoff_that_most_methods_reach(records):
    found = first_panel(records)
    assert found.metric.name == "validation_accuracy"
    assert found.missing == ()
    losses = first_panel(make_records(accuracy=False))
    assert losses.metric.name == "validation_loss"
    assert first_panel([run([1.0, 1.0])]) is None
    assert first_panel([]) is None


def test_it_stands_before_everything_else_which_is_folded(page):
    main = page.split("<main>")[1].split("</main>")[0]
    first, _, rest = main.partition('<section id="about">')
    assert re.findall(r'<div class="chart" id="([^"]+)">', first) == ["frontier-first"]
    assert "<table" not in first
    for section in re.split(r"<section ", rest)[1:]:
        assert '<details class="fold"><summary><h2>' in section, section[:80]
    assert 'class="fold" open' not in main
    assert rest.count("<section ") + 1 == rest.count('<details class="fold">')
    assert page.count("<section ") == page.count("</section>")


def test_the_picture_has_a_title_a_legend_and_every_run(records):
    page = make_page(records)
    spec = picture_spec(page)
    assert spec["title"]["text"] == ["Local parallelism on digits"]
    assert "validation accuracy ≥" in spec["title"]["subtitle"][0]
    assert "hollow runs failed later" in spec["title"]["subtitle"][0]
    assert "hollow" not in picture_spec(make_page((run([2.0, 1.0]),)))["title"]["subtitle"][0]
    assert spec["layer"][0]["encoding"]["color"]["legend"]["orient"] == "bottom"
    (rows,) = spec["datasets"].values()
    assert len(rows) == len(first_panel(records).arrivals)


def test_files_stand_beside_the_page_and_are_linked(built, page):
    svg, png = built.with_name(SVG).read_text(encoding="utf-8"), built.with_name(PNG).read_bytes()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert png.startswith(b"\x89PNG")
    assert '<a href="frontier.svg">' in page
    assert '<a href="frontier.png">' in page


def test_without_a_frontier_there_is_no_picture(tmp_path):
    page = make_page((run([1.0, 1.0]),))
    assert pictures(page) == {}
    text = build(page, tmp_path / "report.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "frontier.svg" not in text


def test_names_in_the_picture_are_text():
    evil = "<script>alert(1)</script>"
    records = tuple(run([2.0, 1.0, 0.5], method=name) for name in (evil, "backprop"))
    svg = pictures(make_page(records, title=evil))[SVG].decode()
    assert "<script" not in svg


def test_wide_tables_scroll_in_a_box_of_their_own(page):
    main = page.split("<main>")[1].split("</main>")[0]
    assert main.count("<table") == main.count('<div class="scroll"><table') > 5
    assert re.search(r"\.scroll td:first-child \{ position: sticky", page)
