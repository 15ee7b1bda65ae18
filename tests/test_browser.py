"""Every kind of page in a real browser: nothing goes wrong there, all is drawn, and text is whole.

A page is seen on a screen, and as narrow as on a phone. What is read off it is in browser.js, how Chromium is driven in
browser.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import browser
from stretto.report.html import _bundle

SITE = Path(__file__).parents[1] / "build" / "site"
WINDOWS = {"screen": (1400, 900), "phone": (420, 900)}  # pixels
UNFOLD = "document.querySelectorAll('details:not(.chart details)').forEach((each) => { each.open = true; })"
ANSWER = "document.querySelector('.verdict, article h1').getBoundingClientRect().bottom"
CHART = "document.querySelector('.chart').getBoundingClientRect().bottom"
SEARCH = """(async () => {
  const box = document.querySelector(".md-search__input");
  box.focus();
  box.value = "bubble";
  box.dispatchEvent(new Event("input", {bubbles: true}));
  box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  for (const until = Date.now() + 30000; Date.now() < until; await new Promise((next) => setTimeout(next, 50))) {
    const found = [...document.querySelectorAll(".md-search-result__link")].map((each) => each.pathname);
    if (found.length) return found;
  }
})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.installed() is None:
        pytest.skip(f"no browser ({', '.join(browser.NAMES)}): apt-get install chromium")
    opened = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Each kind of page, with the program that draws its charts."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.report.html._bundle", _bundle)
        return {"study": study(folder), "run": run(folder), "live": live(folder, 8), "plan": plan(folder),
                "inspection": inspection(folder)}  # fmt: skip


def study(folder):
    from report.synthetic import make_page, make_records, observation
    from stretto.report import build

    records = make_records(rates=(0.1, 0.3, 1.0), seeds=(0, 1))
    records = tuple(replace(each, observations=(observation(10), observation(20))) for each in records)
    delays = {"backprop": (0, 0, 0, 0), "greedy": (1, 1, 0, 0), "chunked(chunks=2)": (6, 4, 2, 0)}
    return build(make_page(records, delays=delays, processes=4), folder / "study.html")


def run(folder):
    from report.synthetic import make_page, make_run, recorded
    from report.test_timeline import run as recordings
    from stretto.report import build
    from stretto.report.recorded_run import timelines

    (record, timed) = (make_run("overlapping", 0.1, 32, 0), recordings("overlapping", latency=2_000_000))
    drawn = timelines(recorded(record.id, record.method, *timed))
    page = make_page((replace(record, seconds_per_step=0.0041, device="cpu"),), processes=4, timelines=(drawn,))
    return build(page, folder / "run.html")


def live(folder, finished, *, reload=600, whole=False):
    from report.synthetic import make_page
    from report.synthetic import run as made
    from stretto.report import build
    from stretto.report.page import StudyProgress

    records = tuple(made([2.0, 1.0], method="greedy", seed=seed) for seed in range(finished))
    progress = None if whole else StudyProgress(share=finished / 9, seconds_left=60, reload=reload)
    return build(make_page(records, planned=9, progress=progress), folder / "live.html")


def plan(folder):
    from report.test_scaling import rows
    from stretto.report.scaling import build_scaling

    return build_scaling(folder / "plan.html", model="decoder", cluster="one node of 8 x A100 80 GB SXM, NVLink",
                         scaled=rows(), by_batch=rows(), per_worker=False, facts={"Model": "decoder"})  # fmt: skip


def inspection(folder):
    from report.test_inspection import FIRST, LAST, inspected
    from stretto.report.inspection import build_inspection

    runs = [inspected(FIRST, LAST), inspected(FIRST)]
    return build_inspection(folder / "inspect.html", title="Inside mlp", inspected=runs, facts={"Data": "digits"})


WRONG = """<section id="here"><p style="width: 60px; overflow: hidden; white-space: nowrap">too long for its place</p>
<p style="width: 60px; overflow-wrap: anywhere">unbreakable</p><div style="width: 2000px; height: 1px"></div>
<div class="chart" id="bare"><svg class="marks" width="99" height="99"><text x="80" y="20">outside</text>
<text x="5" y="50">over</text><text x="7" y="52">under</text></svg></div></section>
<img src="http://127.0.0.1:9/away.png"><script>console.error("said"); nothing();</script>"""


FAULTS = (
    "chart bare is empty", "away.png is not there", "the page is 20", "cut in p of here: ", "too long",
    "broken in p of here: unbre", "cut in bare: outside", "one upon the other in bare: over and under",
)  # fmt: skip


@pytest.mark.slow
def test_what_is_wrong_is_found(chromium, tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text(f"<!DOCTYPE html>{WRONG}")
    chromium.open(page, *WINDOWS["screen"])
    told = "\n".join(chromium.look())
    for fault in FAULTS:
        assert fault in told
    assert chromium.from_elsewhere == ["http://127.0.0.1:9/away.png"]
    told = "\n".join(chromium.complaints)
    assert "error: said" in told
    assert "nothing is not defined" in told


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["study", "run", "live", "plan", "inspection"])
def test_a_page_is_whole(chromium, pages, kind, window):
    chromium.open(pages[kind], *WINDOWS[window])
    _, height = WINDOWS[window]
    assert chromium.look() == []
    assert chromium.run(ANSWER) < height / 2
    if window == "screen" and kind != "inspection":
        assert chromium.run(CHART) < height
    chromium.run(UNFOLD)
    assert chromium.look() == []
    assert chromium.complaints == []
    assert chromium.from_elsewhere == []


@pytest.mark.slow
def test_a_run_begins_with_its_curves_its_speed_and_its_timeline(chromium, pages):
    chromium.open(pages["run"], *WINDOWS["screen"])
    chromium.look()
    seen = (
        "[...document.querySelectorAll('.chart')].filter((each) => each.getBoundingClientRect().bottom < innerHeight)"
    )
    assert chromium.run(f"{seen}.map((each) => each.id)") == [
        "curve-train-step", "curve-validation-step", "speed", "timeline-0-measured",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_live_page_follows_its_study(chromium, tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.report.html._bundle", _bundle)
    page = live(tmp_path, 4, reload=2)
    chromium.open(page, *WINDOWS["screen"])
    assert chromium.run("document.title").startswith("4/9 ")
    chromium.run("document.querySelector('#measured details').open = true; scrollTo(0, 300)")
    live(tmp_path, 5, reload=2)
    while chromium.run("document.title").startswith("4/9 "):
        chromium.wait_for_another()
    assert chromium.run("document.title").startswith("5/9 ")
    assert chromium.run("document.querySelectorAll('#measured .sortable tbody tr').length") == 5
    assert chromium.run("document.querySelector('#measured details').open")
    live(tmp_path, 9, whole=True)
    while chromium.run("document.title").startswith("5/9 "):
        chromium.wait_for_another()
    assert chromium.look() == []
    assert not chromium.run("document.title").startswith("9/9 ")
    assert chromium.run("document.getElementById('unfinished')") is None
    assert chromium.complaints == []


SHOWN = ("index", "which-method", "guide/plan", "api/optim", "gallery", "experiments/delay")


@pytest.fixture(scope="module")
def site():
    if not SITE.is_dir():
        pytest.skip("make site builds the pages")
    return SITE


@pytest.mark.docs
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_of_the_site_is_whole_on_a_disk(chromium, site, name, window):
    chromium.open(site / f"{name}.html", *WINDOWS[window])
    assert chromium.look() == []
    assert chromium.run(ANSWER) < WINDOWS[window][1] / 2
    assert chromium.complaints == []
    assert chromium.from_elsewhere == []


@pytest.mark.docs
def test_the_site_is_searched_on_a_disk(chromium, site):
    chromium.open(site / "guide" / "plan.html", *WINDOWS["screen"])
    assert any(path.startswith(site.as_posix()) and "methods/" in path for path in chromium.run(SEARCH))
    assert chromium.complaints == []
