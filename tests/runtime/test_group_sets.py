"""Trainers leave their process groups to the next ones: nothing grows, and nothing of one is in another."""

import re

import pytest

from runtime.many_trainers import WAYS, made, trained
from runtime.processes import launch

FEW = {"1f1b": 8, "gpipe": 8}  # Trainers, in a quick test; else 100
ENDS = ("closed", "given up", "unfinished")


def cases():
    for way in WAYS:
        for end in ENDS:
            quick = (way, end) in {("1f1b", "given up"), ("gpipe", "closed")}
            yield pytest.param(way, end, FEW[way] if quick else 100, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("way", "end", "number"), [*cases()])
def test_threads_and_descriptors_stay_the_same(way, end, number):
    for there, losses in launch(2, "runtime.many_trainers:many", [way], number, end, own=True):
        threads, files = zip(*there[3:], strict=True)
        assert max(threads) - min(threads) <= 1, there  # one that listened may not have ended yet
        assert len({*files}) == 1, there
        if way != "served":  # whose replicas take turns as they come
            assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize("end", ["closed", pytest.param("unfinished", marks=pytest.mark.slow)])
def test_trainers_after_one_another_train_what_each_trains_alone(end):
    """Whatever an asynchronous one has left on its way, the next one's messages are its own."""
    ways = ["pb", "gpipe", "1f1b", "local-sgd", "sharded"]
    alone = [trained(made(way), flushed=end != "unfinished") for way in ways]
    for _, losses in launch(2, "runtime.many_trainers:many", ways, 2 * len(ways), end):
        for n, each in enumerate(losses):
            assert each == pytest.approx(alone[n % len(ways)], rel=1e-5)


def test_a_closed_trainer_says_so_and_its_groups_are_used_again():
    for same, said, after_an_error, _ in launch(2, "runtime.many_trainers:closed_by_with"):
        assert same
        assert after_an_error
        assert len(said) == 4
        assert all("this Trainer has been closed" in each for each in said)


@pytest.mark.slow
def test_who_does_not_close_or_begin_again_is_missed_in_time():
    closing, beginning = launch(2, "runtime.many_trainers:closed_alone", own=True)[0]
    assert re.match(r"worker 0 waits since \d+ s for the last of gradients of stage 1 from worker 1", closing), closing
    assert "worker 1 has not connected within 1 s" in beginning


def test_what_was_made_in_a_process_group_goes_with_it():
    for there in launch(2, "runtime.many_trainers:begun_again", 4, own=True):
        assert all(now <= before for now, before in zip(there[-1], there[1], strict=True)), there


def test_the_limit_of_open_files_is_told_by_name_before_anybody_connects():
    """By the process that has come to it, and the same by the other."""
    second, first = launch(2, "runtime.many_trainers:held", 30, own=True)
    assert first[0] == second[0]
    assert "the limit of open files (ulimit -n) is" in first[0]
    assert "raise it, or close Trainers that are no longer needed" in first[0]
    assert 1 < first[1] == second[1] < 10
    assert (first[2], second[2]) == (None, 1)
