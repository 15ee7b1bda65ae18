"""How often a run reads a name, makes a method, lays out a schedule and builds a Trainer: once in each process.

Processes that a command starts are forks of one that has imported this file's `COUNTING` first, so they count, too.
"""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import stretto

COUNTING = """
import functools, os
from stretto.methods import table
from stretto.methods.definition import Method
from stretto.options import named
from stretto.trainer import trainer

def counting_calls(name, function, first=lambda *_: ""):
    @functools.wraps(function)
    def counting(*arguments, **options):
        with open(os.environ["COUNTS"], "a") as file:
            print(os.getpid(), name, first(*arguments), sep="\\t", file=file)
        return function(*arguments, **options)
    return counting

read = named.name_and_options.__wrapped__
named.name_and_options = functools.lru_cache(maxsize=None)(counting_calls("parse", read, lambda text: text))
Method.plan = counting_calls("plan", Method.plan)
trainer.Trainer.__init__ = counting_calls("Trainer", trainer.Trainer.__init__)
"""
COMMAND = """
import sys, counting
from stretto.system import fork_server
fork_server.NEEDED = (*fork_server.NEEDED, "counting")
from stretto.cli import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = (
    "--model-options.depth",
    "3",
    "--steps",
    "2",
    "--evaluations",
    "1",
    "--quiet",
    "--lr",
    "0.1",
    "--batch-size",
    "32",
)
TRAIN = ("train", *SMALL)
SMALL_STUDY = ("compare", *SMALL, "--seeds", "1", "--jobs", "1")


@pytest.fixture
def counts(tmp_path):
    """Run a command; what each of its processes that built a Trainer did how often, by (what, text)."""
    (tmp_path / "counting.py").write_text(COUNTING)

    def run(*words: str) -> list[Counter[tuple[str, str]]]:
        source = Path(stretto.__file__).parents[1]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{source}", "COUNTS": str(tmp_path / "counts")}
        subprocess.run(
            [sys.executable, "-c", COMMAND, *words, "--out", str(tmp_path / "out")], env=environment, check=True
        )
        by_process: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        for line in (tmp_path / "counts").read_text().splitlines():
            process, name, text = line.split("\t")
            by_process[process][name, text] += 1
        return list(by_process.values())

    return run


@pytest.mark.slow
def test_an_emulated_run_builds_one_trainer(counts):
    (counted,) = counts(*TRAIN, "--method", "overlapping(delay=1)")
    assert counted["Trainer", ""] == 1
    assert counted["plan", ""] == 1
    assert {key: many for key, many in counted.items() if key[0] == "parse"} == {
        ("parse", "overlapping(delay=1)"): 1, ("parse", "auto"): 1, ("parse", "all-reduce"): 1
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_on_processes_builds_one_trainer_in_each(counts):
    every = counts(*TRAIN, "--method", "greedy(head=two-layer)", "--workers", "2")
    assert len(every) == 3  # the command, and two workers
    for counted in every:
        assert counted["Trainer", ""] == 1
        assert counted["plan", ""] == 1
        assert counted["parse", "greedy(head=two-layer)"] == counted["parse", "two-layer"] == 1


@pytest.mark.slow
def test_a_study_tries_each_method_once_trains_it_once_and_draws_it_once(counts):
    (counted,) = counts(*SMALL_STUDY, "--methods", "backprop,greedy")
    assert counted["Trainer", ""] == 2 * 2  # it is tried, and it trains
    assert counted["plan", ""] == 2 * 2
    assert {many for (name, _), many in counted.items() if name == "parse"} == {1}
