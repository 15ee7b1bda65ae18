"""When something goes wrong: said once, with its place; nobody is left behind."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from runtime import processes
from runtime.nursery import Forked
from runtime.processes import speakers

SCRIPT = Path(__file__).with_name("faulty.py")


def run(kind, number=3, *, whole, killed=()):
    return processes.run(number, [sys.executable, str(SCRIPT), kind], whole=whole, killed=killed)


def test_an_error_names_worker_stage_and_action_once():
    statuses, said = run("error", whole=True)
    assert statuses == [1, 1, 1]
    assert speakers(said, "Traceback") == [1]
    assert "ValueError: bad luck" in said[1]
    assert "in action 1F5: stage 1, micro-batch 5" in said[1]
    assert "on worker 1, pid" in said[1]


def test_a_killed_worker_is_missed_once():
    statuses, said = run("killed", whole=True)
    assert statuses[1] == -9
    assert statuses[0] == statuses[2] == 1
    assert len(speakers(said, "worker 1 is gone: it ended without a word")) == 1
    assert len(speakers(said, "Traceback")) == 1


def test_a_hang_shows_who_waits_for_whom_and_ends(whole):
    statuses, said = run("stuck", whole=whole, killed=(1,))
    assert statuses == [1, -9, 1]
    text = "".join(said)
    assert "stretto: worker" in text
    assert "from worker 1, which is in 1F5 since" in text
    assert "--timeout, or Trainer(timeout=), sets how long a worker waits" in text


def test_an_error_between_two_steps_ends_all(whole):
    statuses, said = run("script", whole=whole)
    assert statuses == [1, 1, 1]
    assert speakers(said, "Traceback") == [1]
    assert "my own mistake" in said[1]


def test_who_waits_for_a_process_that_has_left_misses_it_within_seconds(whole):
    """Its exit status is its own; nobody has told the others, whose timeout is 300 s."""
    statuses, said = run("leaves", whole=whole)
    assert statuses == [1, 3, 1]
    assert len(speakers(said, "worker 1 has come to the end of its script while worker")) == 1


@pytest.mark.slow
def test_who_has_got_a_broadcast_may_leave_before_others_ask_for_it():
    statuses, said = run("late", 4, whole=False)
    assert statuses == [0] * 4, said


def test_a_mistake_that_all_make_is_said_once(whole):
    statuses, said = run("mistake", 2 + whole, whole=whole)
    assert statuses == [1] * (2 + whole)
    assert len(speakers(said, "unknown method 'pbb'")) == 1


def test_processes_that_would_train_different_things_are_refused(whole):
    statuses, said = run("method", 2 + whole, whole=whole)
    assert statuses == [1] * (2 + whole)
    text = "".join(said)
    assert "method is '1f1b" in text
    assert "on rank 0 and 'pb' there" in text


def test_more_processes_than_stages_are_refused(whole):
    statuses, said = run("fine", 4, whole=whole)
    assert statuses == [1, 1, 1, 1]
    assert len(speakers(said, "4 processes for 3 stages: 1 would have nothing to do")) == 1


def test_a_mistake_of_a_spawned_script_is_its_parents_to_tell():
    """torch.multiprocessing tells of the process that ends first, and ends the others."""
    with tempfile.TemporaryDirectory() as folder:  # torch leaves files there
        script = Forked([sys.executable, str(SCRIPT.with_name("spawned.py"))], {**os.environ, "TMPDIR": folder})
        assert script.wait(120) == 1
        assert "ValueError: a mistake of the script" in script.communicate()[1]
