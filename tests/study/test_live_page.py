"""The page of a study while its runs are made: written early, not too often, by one process, and no danger to it."""

import multiprocessing
import shutil
from dataclasses import replace

import pytest

from stretto.settings.runs import CompareSettings
from stretto.study import compare, comparison, open_study, read_study, write_report
from stretto.study.comparison import LivePage, PageWriter
from stretto.study.store import locked
from stretto.study.study import claimed
from stretto.study.training_run import run
from stretto.system import fork_server
from waiting import wait_for

SETTINGS = CompareSettings(
    model_options={"depth": 2, "width": 8}, steps=6, evaluations=2, methods=("backprop", "greedy"), lr=(0.1,),
    batch_size=(32,), seeds=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a study of four runs, of which one is made; no test changes it."""
    study = open_study(SETTINGS, tmp_path_factory.mktemp("begun") / "study")
    with claimed(study):
        run(study.tasks[0].settings, study.tasks[0].folder)
    return study.out


@pytest.fixture
def opened(begun, tmp_path):
    """A study of four runs, of which one is made."""
    return open_study(SETTINGS, shutil.copytree(begun, tmp_path / "study"))


def banner(study):
    text = (study.out / "report.html").read_text(encoding="utf-8")
    return text.split('<p class="unfinished"')[1].split("</p>")[0] if '<p class="unfinished"' in text else ""


def test_a_page_of_the_runs_that_are_finished(opened):
    assert PageWriter(opened).write_if_due(0.3, 200.0)
    for told in ("<b>1 of 4 runs is finished</b>", "about 3 minutes left", "30 % of the steps", 'data-reload="15"'):
        assert told in banner(opened), told
    assert not (opened.out / "frontier.png").exists()  # pictures to share wait for the end


def test_not_more_often_than_its_cost_allows(opened, monkeypatch):
    now, spent = 1000.0, 0.0
    monkeypatch.setattr(comparison.time, "monotonic", lambda: now)
    monkeypatch.setattr(comparison.time, "process_time", lambda: spent)
    made = []

    def build(page, path):
        nonlocal spent
        spent += 1.0  # a second of computing
        made.append(len(page.records))

    monkeypatch.setattr(comparison, "build", build)
    writer = PageWriter(opened)
    assert writer.write_if_due(0.3, None)
    run(opened.tasks[1].settings, opened.tasks[1].folder)
    for now, due in ((1019.0, False), (1020.0, True), (1050.0, False), (1080.0, True)):
        # 1 s is 5 % of 20 s; without another run the time left is written again after a minute
        assert writer.write_if_due(0.5, None) == due, now
    assert made == [1, 2, 2]


def test_the_last_page_is_left_to_the_command(opened):
    for task in opened.pending:
        run(task.settings, task.folder)
    assert not PageWriter(opened).write_if_due(1.0, 0.0)


def test_one_writer_of_several_commands(opened, monkeypatch):
    monkeypatch.setattr(comparison, "build", lambda page, path: None)
    second = PageWriter(opened, shared=True)
    with PageWriter(opened, shared=True) as first:
        assert first.write_if_due(0.3, None)
        assert not second.write_if_due(0.3, None)
    with second:  # the first has ended
        assert second.write_if_due(0.3, None)
    alone = PageWriter(opened)
    with locked(opened.out / ".lock", opened.out):
        assert alone.write_if_due(0.3, None)


def test_a_process_writes_it_and_ends(opened):
    with LivePage(opened, pytest.fail, begin=0) as page:
        assert not multiprocessing.active_children()
        page.advance(6)
        wait_for((opened.out / "report.html").is_file)
        assert "1 of 4 runs" in banner(opened)
        assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()
    assert [path.name for path in opened.out.glob(".report*")] == []


def test_a_short_study_starts_no_process(opened, monkeypatch):
    monkeypatch.setattr(fork_server, "start", lambda *_: pytest.fail("a process"))
    with LivePage(opened, pytest.fail) as page:
        page.advance(6)


@pytest.mark.slow
def test_what_goes_wrong_is_told_once(opened):
    told = []
    (opened.out / "report.html").mkdir()  # nothing can be written there
    with LivePage(opened, told.append, begin=0) as page:
        page.advance(1)
        wait_for(lambda: page._child.pipe.poll())
        for _ in range(3):
            page._told = 0.0
            page.advance(1)
    (text,) = told
    assert "is not kept up to date while the study runs: cannot write to" in text
    assert "The study goes on" in text


def test_a_process_that_dies_is_told_once(opened):
    told = []
    with LivePage(opened, told.append, begin=0) as page:
        page.advance(1)
        page._child.process.kill()
        page._child.process.join()
        for _ in range(3):
            page._told = 0.0
            page.advance(1)
    assert ["its process has ended" in text for text in told] == [True]


@pytest.mark.usefixtures("no_pictures")
def test_the_study_has_the_same_page_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "BEGIN", 0.0)
    study = open_study(replace(SETTINGS, seeds=1), tmp_path / "study")
    pages = []

    class Watched(LivePage):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, begin=0, **options)
            pages.append(self)

    monkeypatch.setattr("stretto.study.comparison.LivePage", Watched)
    outcome = compare(study, jobs=1, command="stretto compare", tell=pytest.fail)
    assert pages[0]._child.process.exitcode is not None
    assert pages[0]._done == 2 * 6
    live = outcome.report.read_bytes()
    assert b"unfinished" not in live.split(b"<header>")[1].split(b"</header>")[0]
    write_report(study, "stretto compare")
    assert outcome.report.read_bytes() == live


def test_the_time_left_follows_from_the_steps(opened):
    page = LivePage(opened, pytest.fail)
    assert page._progress(10.0) == (0.25, None)  # the run that was there took no time here
    page.advance(6)
    assert page._progress(10.0) == (0.5, 20.0)


@pytest.mark.usefixtures("no_pictures")
def test_stretto_report_says_what_is_missing(opened):
    write_report(read_study(opened.out))
    assert "<b>1 of 4 runs is finished</b>. The command that began" in banner(opened)
    assert "data-reload" not in banner(opened)


def test_a_study_without_any_run_has_a_page(tmp_path):
    study = open_study(SETTINGS, tmp_path / "study")
    with claimed(study):
        write_report(study)
    assert "0 of 4 runs are finished" in banner(study)
