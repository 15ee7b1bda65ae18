"""A study that several processes share: each run is made once, whoever is lost."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import replace

import pytest

from cli.processes import start
from stretto import UsageError
from stretto.cli.program import main
from stretto.errors import StrettoError
from stretto.settings.runs import CompareSettings
from stretto.study import open_study, study
from stretto.study.comparison import compare, share
from stretto.study.run_processes import Failure
from stretto.study.shared_queue import (
    SharedQueue,
    last_trials,
    open_storage,
    storage_errors,
    valid_trials,
    without_password,
)
from stretto.study.store import EVENTS, RUN
from stretto.study.training_run import run as make_run
from stretto.system import fork_server
from waiting import wait_for

SETTINGS = CompareSettings(
    model_options={"depth": 2, "width": 8},
    steps=4,
    evaluations=1,
    methods=("backprop", "greedy"),
    lr=(0.05, 0.1, 0.2),
    batch_size=(32,),
    seeds=1,
)
STUDY = ["compare", "--model-options.depth", "2", "--model-options.width", "8", "--evaluations", "1", "--methods",
         "backprop,greedy", "--lr", "0.05,0.1,0.2", "--batch-size", "32", "--seeds", "1", "--jobs", "1"]  # fmt: skip
KINDS = [pytest.param("sqlite", marks=pytest.mark.slow), "journal"]


def url_of(kind, folder):
    return f"sqlite:///{folder}/study.db" if kind == "sqlite" else f"journal:{folder}/study.log"


def trials_of(url, opened):
    return SharedQueue(open_storage(url), opened)._trials()


def queue(url, opened):
    """One whose signs of life, and patience, are those of a test."""
    return SharedQueue(open_storage(url), opened, beat=0.05, patience=0.5, pause=0)


@pytest.mark.slow
def test_two_processes_make_each_run_once_and_report_all(tmp_path):
    url = url_of("sqlite", tmp_path)
    fork_server.prepare()
    context = multiprocessing.get_context(fork_server.method())
    processes = [
        context.Process(target=main, args=([*STUDY, "--steps", "40", "--storage", url, "--quiet", "--out", out],))
        for out in (str(tmp_path / name) for name in "ab")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    opened = open_study(replace(SETTINGS, steps=40), tmp_path / "a")
    trials = trials_of(url, opened)
    assert {trial.user_attrs["run"] for trial in trials} == {task.settings.id for task in opened.tasks}
    assert {trial.state.name for trial in trials if "twice" not in trial.user_attrs} == {"COMPLETE"}
    made = [{path.parent.name for path in (tmp_path / name).glob("runs/*/model.safetensors")} for name in "ab"]
    assert not made[0] & made[1]
    assert made[0] | made[1] == {trial.user_attrs["run"] for trial in trials}
    for run in made[0] | made[1]:  # both have what the other one made
        for name in (RUN, EVENTS):
            assert (tmp_path / "a" / "runs" / run / name).read_text() == (
                tmp_path / "b" / "runs" / run / name
            ).read_text()
    assert opened.pending == []
    assert all((tmp_path / name / "report.html").is_file() for name in "ab")


def test_the_run_of_a_process_that_was_killed_is_made_by_another_one(tmp_path):
    url = url_of("journal", tmp_path)
    settings = replace(SETTINGS, steps=20_000, lr=(0.05,), methods=("greedy",))
    words = [*STUDY, "--lr", "0.05", "--methods", "greedy", "--steps", "20000", "--storage", url, "--quiet"]
    for option in ("--lr", "--methods"):  # those of STUDY give way
        del words[(at := words.index(option)) : at + 2]
    opened = open_study(settings, tmp_path / "here")
    there = start([*words, "--out", str(tmp_path / "there")], tmp_path)
    wait_for(lambda: any((tmp_path / "there").glob("runs/.*.partial/events.jsonl")), there)
    os.killpg(there.pid, signal.SIGKILL)
    there.communicate()
    (lost,) = trials_of(url, opened)
    assert lost.state.name == "RUNNING"
    with study.claimed(opened), queue(url, opened) as mine:
        assert mine.take() is None  # it may be alive
        wait_for(lambda: (mine.take() or None) is not None)
    first, second = trials_of(url, opened)
    assert (first.state.name, second.user_attrs["run"]) == ("FAIL", first.user_attrs["run"])


@pytest.mark.parametrize(
    ("kind", "number", "rates"),
    [
        ("sqlite", 2, (0.1,)),
        ("journal", 4, (0.05, 0.1, 0.2)),
        pytest.param("sqlite", 4, (0.05, 0.1, 0.2), marks=pytest.mark.slow),
    ],
)
def test_however_many_take_at_once_nobody_takes_what_another_one_has(tmp_path, kind, number, rates):
    url = url_of(kind, tmp_path)
    opened = open_study(replace(SETTINGS, lr=rates), tmp_path / "s")
    storages = [open_storage(url) for _ in range(number)]
    taken, ready = [], threading.Barrier(number)

    def work(storage):
        ready.wait()
        mine = SharedQueue(storage, opened, pause=0)
        mine._add_missing(again=True)
        while (task := mine.take()) is not None:
            taken.append(task.settings.id)

    threads = [threading.Thread(target=work, args=(storage,)) for storage in storages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(task.settings.id for task in opened.tasks)
    counted = [trial for trial in trials_of(url, opened) if "twice" not in trial.user_attrs]
    assert len(counted) == len(opened.tasks)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_made_is_given_back(tmp_path, kind):
    url = url_of(kind, tmp_path)
    opened = open_study(SETTINGS, tmp_path / "s")
    with queue(url, opened) as mine:
        task = mine.take()
    with queue(url, opened) as mine:
        assert task in [mine.take() for _ in opened.tasks]
        assert mine.take() is None


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_could_not_be_made_is_tried_again_by_the_next_command_only(tmp_path, kind):
    url, opened = url_of(kind, tmp_path), open_study(replace(SETTINGS, lr=(0.1,)), tmp_path / "s")
    with queue(url, opened) as mine, queue(url, opened) as other:
        task = mine.take()
        mine.fail(Failure(task, "it is cold"))
        assert other.take() not in (None, task)
        assert other.take() is None
        assert not mine.settled
        (failure,) = mine.failures()
        assert (failure.task, failure.reason) == (task, "it is cold")
    with queue(url, opened) as again:
        assert task in (again.take(), again.take())


@pytest.mark.slow
def test_a_study_goes_on_and_takes_over_what_was_made_without_a_storage(tmp_path):
    out, url = tmp_path / "s", url_of("journal", tmp_path)
    few = compare(open_study(replace(SETTINGS, lr=(0.1,)), tmp_path / "few"), jobs=1)
    assert few.failures == ()
    opened = open_study(SETTINGS, out)
    for task in open_study(replace(SETTINGS, lr=(0.1,)), tmp_path / "few").tasks:
        target = out / "runs" / task.settings.id
        target.parent.mkdir(parents=True, exist_ok=True)
        task.folder.rename(target)
    study.write_json(out / "study.json", {"settings": opened.settings.to_json()})
    seen = []
    outcome = compare(opened, jobs=2, storage=url, on_run=lambda task: seen.append(task.settings.id))
    assert outcome.failures == ()
    assert len(outcome.records) == 6
    assert len(seen) == 4
    trials = trials_of(url, opened)
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    losses = {json.loads(trial.user_attrs["files"][RUN])["record"]["validation_loss"] for trial in trials}
    assert {trial.value for trial in trials} == losses
    assert compare(open_study(SETTINGS, tmp_path / "other"), jobs=1, storage=url).records == outcome.records


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize("kind", KINDS)
def test_what_another_one_ends_at_the_last_moment_is_fetched(tmp_path, kind):
    """Between this one's look for results and its question whether all have ended."""
    url, one = url_of(kind, tmp_path), replace(SETTINGS, lr=(0.1,), methods=("greedy",))
    there, here = open_study(one, tmp_path / "there"), open_study(one, tmp_path / "here")
    assert compare(there, jobs=1).failures == ()
    with study.claimed(here), queue(url, there) as other, Unlucky(open_storage(url), here, pause=0) as mine:
        (trial,) = other._trials()
        assert other._claim(trial.user_attrs["run"], trial)
        mine.meanwhile = lambda: other.finish(there.tasks[0])
        share(mine, 1, lambda _: None, lambda _: None)
    assert here.pending == []


class Unlucky(SharedQueue):
    """One that looks away at the wrong moment."""

    meanwhile = None

    @property
    def settled(self):
        """Somebody ends before it is looked."""
        if self.meanwhile is not None:
            self.meanwhile()
            self.meanwhile = None
        return super().settled


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_fails_while_sharing_is_said(tmp_path, monkeypatch, kind):
    def make(task, _):
        raise RuntimeError(f"{task.settings.method} is tired")

    monkeypatch.setattr("stretto.study.run_processes._make", make)
    opened = open_study(replace(SETTINGS, lr=(0.1,)), tmp_path / "s")
    with study.claimed(opened), queue(url_of(kind, tmp_path), opened) as mine:
        (tmp_path / "s" / "runs").mkdir()
        failures = share(mine, 1, lambda _: None, lambda _: None)
    assert sorted(failure.reason.partition(" (")[0] for failure in failures) == [
        "RuntimeError: backprop is tired",
        "RuntimeError: greedy is tired",
    ]


def test_which_trial_counts():
    from optuna.trial import TrialState, create_trial

    trials = [
        create_trial(state=TrialState.FAIL, user_attrs={"run": "a"}),
        create_trial(state=TrialState.WAITING, user_attrs={"run": "a"}),
        create_trial(state=TrialState.WAITING, user_attrs={"run": "a", "twice": True}),
        create_trial(state=TrialState.FAIL, user_attrs={"run": "b"}),
    ]
    assert valid_trials(trials) == {"a": trials[1]}
    assert last_trials(trials) == {"a": trials[1], "b": trials[3]}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://here", "storage='redis://here': give journal:PATH"),
        ("journal:", "name a file in a folder that is there"),
        ("journal:/tmp", "cannot write to /tmp: it is a folder"),
        ("journal:/dev/full", "cannot write to /dev/full: No space left on device"),
        ("journal:nowhere/x.log", "name a file in a folder that is there"),
        ("sqlite:///nowhere/x.db", "cannot be opened (unable to open database file)"),
        ("postgresql+nothing://here/x", "cannot be opened"),
    ],
)
def test_storages_that_cannot_be(url, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_what_no_other_process_can_open_is_refused(url):
    with pytest.raises(UsageError, match="cannot be opened"):
        open_storage(url)


def test_no_connection_of_sqlite_stays_open(tmp_path):
    from sqlalchemy import event
    from sqlalchemy.pool import Pool

    connections = []

    def opened(connection, _):
        connections.append(connection)

    def closed(connection, _):
        connections.remove(connection)

    event.listen(Pool, "connect", opened)
    event.listen(Pool, "close", closed)
    try:
        with SharedQueue(
            open_storage(url_of("sqlite", tmp_path)), open_study(SETTINGS, tmp_path / "s"), pause=0
        ) as mine:
            assert mine.take() is not None
            assert mine.settled is False
            assert connections == []  # no sign of life is given yet
    finally:
        event.remove(Pool, "connect", opened)
        event.remove(Pool, "close", closed)
    assert connections == []


@pytest.mark.parametrize(
    ("url", "package"),
    [("postgresql+psycopg2://me:secret@here/x", "psycopg2-binary"), ("postgresql+psycopg://here/x", "psycopg[binary]")],
)
def test_a_driver_that_is_not_there_is_named(url, package, monkeypatch):
    for module in ("psycopg2", "psycopg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    assert str(caught.value).endswith(f"pip install '{package}'")
    assert "secret" not in str(caught.value)


def test_signs_of_life_go_on_when_the_storage_was_away(tmp_path, monkeypatch):
    from optuna.exceptions import StorageInternalError

    with queue(url_of("journal", tmp_path), open_study(SETTINGS, tmp_path / "s")) as mine:
        assert mine.take() is not None
        real, left = mine._storage.set_trial_user_attr, [1, 2]

        def away_twice(*said):
            if left:
                left.pop()
                raise StorageInternalError("away")
            real(*said)

        monkeypatch.setattr(mine._storage, "set_trial_user_attr", away_twice)
        wait_for(lambda: any("beats" in trial.user_attrs for trial in mine._trials()))


def test_a_storage_that_is_lost_is_said_without_its_password():
    from optuna.exceptions import StorageInternalError

    url = "postgresql://me:se:cr@t@there/name"
    said = r"//me:\.\.\.@there/name' cannot be reached any more \(gone\): finished runs"
    with pytest.raises(StrettoError, match=said), storage_errors(url):
        raise StorageInternalError("gone")
    assert without_password(f"--storage={url}") == "--storage=postgresql://me:...@there/name"
    assert without_password("sqlite:///a:b@c.db") == "sqlite:///a:b@c.db"


OWN = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return (x, x[:, :1]), (x, x[:, :1])
"""


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize("kind", KINDS)
def test_who_has_edited_a_function_is_refused_while_the_study_is_unfinished(tmp_path, monkeypatch, kind):
    """It would make all runs of a study of its own. Nothing is lost, and an edit after the end is another study."""
    monkeypatch.chdir(tmp_path)
    own, url = tmp_path / "own.py", url_of(kind, tmp_path)
    own_model = {"model": "own.py:build", "model_options": {}, "data": "own.py:data", "loss": "mse_loss", "stages": 2}
    settings = replace(SETTINGS, **own_model, lr=(0.1,))
    own.write_text(OWN)
    first = open_study(settings, tmp_path / "one")
    with queue(url, first) as began:
        made = began.take()
        make_run(made.settings, made.folder)
        began.finish(made)
        own.write_text(OWN.replace("Tanh", "ReLU"))
        edited = open_study(settings, tmp_path / "two")
        with pytest.raises(UsageError, match=r"with other versions of own\.py \(or a file that it imports\): give"):
            compare(edited, jobs=1, storage=url)
        assert not (tmp_path / "two").exists()
    own.write_text(OWN)
    both = compare(open_study(settings, tmp_path / "two"), jobs=1, storage=url)
    assert len(both.records) == len(first.tasks)
    assert not (tmp_path / "two" / "runs" / made.settings.id / "model.safetensors").exists(), "it was made elsewhere"
    own.write_text(OWN.replace("Tanh", "ReLU"))
    assert len(compare(open_study(settings, tmp_path / "three"), jobs=1, storage=url).records) == len(first.tasks)
