"""A run in several trackers: rows by step, one that fails is told once, names are checked."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from stretto.errors import UsageError
from stretto.trackers import CSV, RunDescription, Tracker, TrackerRun, find
from stretto.trackers.tracker import TrackedRun, grouped


class Memory(TrackerRun):
    """What was written, and an error where it is asked for."""

    def __init__(self, tracker):
        self.id, self.fails_in, self.calls = f"{tracker.name}-1", tracker.fails_in, []

    def _note(self, call, what):
        if call == self.fails_in:
            raise ConnectionError("no route to host")
        self.calls.append((call, what))

    def write(self, rows):
        self._note("write", list(rows))

    def add_file(self, path):
        self._note("add_file", path)

    def close(self, *, finished):
        self._note("close", finished)


@dataclass(frozen=True, kw_only=True)
class Kept(Tracker):
    """A tracker in memory."""

    name: ClassVar[str] = "kept"
    fails_in: str = ""
    opened: ClassVar[list[Memory]] = []

    def open(self, run):
        if self.fails_in == "open":
            raise ConnectionError("no route to host")
        self.opened.append(Memory(self))
        return self.opened[-1]


@dataclass(frozen=True, kw_only=True)
class Other(Kept):
    name: ClassVar[str] = "other"


@pytest.fixture(autouse=True)
def nothing_opened():
    Kept.opened.clear()


def test_rows_are_gathered_by_step_and_passed_on_in_order():
    run = TrackedRun([Kept()], RunDescription("a"), pytest.fail)
    run.write(2, {"loss": 0.5})
    run.write(1, {"loss": 1.0})
    run.write(2, {"lr": 0.1})
    run.close(finished=True)
    (kept,) = Kept.opened
    assert kept.calls == [("write", [(1, {"loss": 1.0}), (2, {"loss": 0.5, "lr": 0.1})]), ("close", True)]


@pytest.mark.parametrize("call", ["open", "write", "add_file", "close"])
def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(call, tmp_path):
    told = []
    run = TrackedRun([Kept(fails_in=call), Other()], RunDescription("a"), told.append)
    for step in (1, 2, 3):
        run.write(step, {"loss": 1.0})
        run.flush()
        run.add_file(tmp_path)
    assert run.ids == ({"other": "other-1"} if call != "close" else {"kept": "kept-1", "other": "other-1"})
    run.close(finished=False)
    assert told == [
        "tracker kept failed (ConnectionError: no route to host): it gets nothing more of this run; training goes on"
    ]
    assert [name for name, _ in Kept.opened[-1].calls] == ["write", "add_file"] * 3 + ["close"]


def test_trackers_by_name_and_as_they_are_written():
    (tracker,) = find("csv(folder='a b',every=5)")
    assert tracker == CSV(folder="a b", every=5)
    assert find([str(tracker)]) == (tracker,)
    assert [each.name for each in find(["csv", "tensorboard(folder=logs)"])] == ["csv", "tensorboard"]
    assert find(()) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'"),
        ("csv(path=3)", "tracker 'csv' has no option 'path'"),
        ("csv(every=0)", "csv: every=0"),
        ("wandb(mode=on)", "wandb: mode='on'"),
        (["csv", "csv(folder=b)"], "csv is given twice"),
        (3, r"log=3: it must be tensorboard, wandb, mlflow, csv|log=3"),
        ([3], r"log=\[3\]"),
    ],
)
def test_what_is_no_tracker_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        find(given)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("stretto.trackers.tracker.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="fit: log: wandb needs wandb, which is not installed: pip install wandb"):
        find("wandb", "fit: log")
    assert find("csv")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "step/loss"),
        ("lr/stage_1", "step/lr/stage_1"),
        ("validation_loss", "validation/loss"),
        ("test_mae", "test/mae"),
        ("train_accuracy", "train/accuracy"),
        ("total_flops", "usage/total_flops"),
        ("peak_memory_bytes/rank_0", "usage/peak_memory_bytes/rank_0"),
    ],
)
def test_names_are_grouped_where_trackers_group(key, name):
    assert grouped(key) == name
