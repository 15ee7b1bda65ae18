"""A refusal is the same error on every process, which a script can catch to go on; `refused.py` has the script."""

import sys

import pytest
import torch

from runtime import given_apart, refused, scripts
from runtime.processes import launch

PARTED = (
    "these processes have parted, because of an error before or as their process group was destroyed: make a new "
    "Trainer, in each of them"
)
FIRST = {
    "method": "unknown method 'pbb'",
    "method of one": "unknown method 'pbb'",
    "differs": "trains something else than rank 0",
    "step of one": "y is None in this process, where a loss is",
    "evaluate": "",
    "load": "nowhere",
    "load of one": "nowhere",
    "stage": "no more than 3 passes of (",
    "own": "has its own rules",
}


FEW = ("method of one", "differs", "step of one", "load of one", "stage", "own")


@pytest.mark.parametrize(
    ("processes", "kinds"), [(3, FEW), pytest.param(4, refused.REFUSALS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_all_processes_refuse_alike_and_go_on(processes, kinds, tmp_path):
    """One job, many refusals after each other: each new Trainer finds the others again."""
    results = launch(processes, "runtime.refused:go", kinds, str(tmp_path))
    for n, kind in enumerate(kinds):
        errors = [told[2 * n] for told, _ in results]
        names, texts, sayers, notes = zip(*errors, strict=True)
        assert set(names) == {"UsageError"}, (kind, errors)
        assert len(set(texts)) == 1, (kind, errors)
        assert FIRST[kind] in texts[0]
        (first,) = {each for each in sayers if each is not None}
        assert [rank for rank, each in enumerate(sayers) if each is None] == [first]
        assert "one" not in kind or first == processes - 1
        assert kind != "own" or f"rank {processes - 1} has" in texts[0]
        assert all(any(f"on worker {first}, pid" in note for note in each) for each in notes), notes
        assert [told[2 * n + 1] for told, _ in results] == [PARTED] * processes
        if kind == "stage":
            assert all(any("stage 2" in note for note in each) for each in notes), notes
    losses, weights, evaluated = scripts.train("pb", steps=8, flush_at=3)
    for _, (there, gathered, same) in results:
        assert (there, same) == (losses, evaluated)
        assert gathered is None or all(torch.equal(gathered[key], weights[key]) for key in weights)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names where there is /proc")
def test_nothing_works_for_groups_that_have_parted(tmp_path):
    """A thread of gloo whose connections were cut turns without end."""
    assert launch(3, "runtime.refused:threads_after", "stage", str(tmp_path)) == [0, 0, 0]


def test_a_buffer_that_stages_on_two_processes_share_and_training_changes_is_refused():
    """The first step finds it out; a table stays the same on both."""
    for table, norm in launch(2, "runtime.scripts:shared_norm", timeout=60):
        assert table == "trained"
        assert "training changes the buffer" in norm
        assert "Give each stage a module of its own" in norm


def test_batches_that_differ_are_told_with_both_ranks():
    """At steps 0, 1, 2, 4, ...; what a process does not pass is no difference."""
    kinds = {("x", 0): (0, "rank 2", "rank 0"), ("y", 2): (2, "rank 2", "rank 1"), ("x", 3): (4, "rank 2", "rank 0")}
    results = launch(3, "runtime.given_apart:apart_each", list(kinds))
    for (where, _), (step, rank, other), *told in zip(
        kinds, kinds.values(), *(said for said, _ in results), strict=True
    ):
        assert {number for number, _ in told} == {step}
        (text,) = {text for _, text in told}
        assert text.startswith(f"{rank} is given another batch than {other}: {where} of step {step + 1} is '")
        assert text.endswith("and seed what shuffles or changes them alike")
    losses, weights = given_apart.alike("pb")
    (first, gathered), *others = (same for _, same in results)
    assert [first, *(told for told, _ in others)] == [losses] * 3
    assert all(torch.equal(gathered[key], weights[key]) for key in weights)
