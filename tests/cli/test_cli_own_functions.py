"""User's functions that print, or that end the process, from the command line."""

import json
from pathlib import Path

import pytest

from cli.processes import start
from stretto.cli import main

OWN = """
import os
import sys

import torch
from torch import nn

import stretto

print("imported")


def act(where):
    print("in", where)
    place, _, how = os.environ.get("ACT", "").partition(" ")
    if place == where:
        exec(how)


class Loud(nn.Linear):
    def forward(self, x):
        act("forward")
        return super().forward(x)


def build():
    act("build")
    return [Loud(4, 4), Loud(4, 3)]


def data():
    act("data")
    return [(torch.ones(8, 4), torch.arange(8) % 3)] * 2


def loss(output, y):
    act("loss")
    return nn.functional.cross_entropy(output, y)


def optimizer(params, lr=0.1):
    act("optimizer")
    return torch.optim.SGD(params, lr=lr)


def method():
    act("method")
    return stretto.method("backprop")
"""
GIVEN = [word for name in ("model build", "data data", "loss loss", "optimizer optimizer") for word in (
    f"--{name.split()[0]}", f"own.py:{name.split()[1]}")]  # fmt: skip
TRAIN = ["train", *GIVEN, "--method", "own.py:method", "--steps", "1", "--evaluations", "1", "--out", "run"]
FOLDERS = [
    ["report", "run", *GIVEN, "--method", "own.py:method"],
    ["inspect", "run", *GIVEN, "--method", "own.py:method"],
]
COMMANDS = [
    TRAIN,
    ["compare", *GIVEN, "--methods", "backprop", "--seeds", "1", "--steps", "1", "--lr", "1", "--batch-size", "8",
     "--jobs", "1"],
    ["simulate", "--model", "own.py:build", "--data", "own.py:data", "--method", "own.py:method", "--stages", "2"],
    ["plan", *GIVEN, "--cluster", "8-a100", "--workers", "1", "--out", "plan.toml"],
    ["show", "own.py:method", "--stages", "2"],
    ["doctor", "--model", "own.py:build"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, plain_pages):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_under_json_what_they_print_goes_to_stderr(words, capsys):
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    assert isinstance(json.loads(told.out), dict)
    assert "imported\n" in told.err
    assert "in " in told.err.replace("imported\n", "")


LOGGER = """

class Logger:
    def __init__(self):
        self.stdout = sys.stdout

    def write(self, text):
        self.stdout.write(text)

    def flush(self):
        self.stdout.flush()


sys.stdout = Logger()
"""


def test_a_logger_in_the_place_of_stdout_takes_no_document(folder):
    Path("own.py").write_text(OWN + LOGGER)
    process = start([*TRAIN, "--json"], folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 1


def test_without_json_it_goes_to_stdout(capsys):
    assert main(["show", "own.py:method", "--stages", "2"]) == 0
    assert "in method\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--workers", "2", "--stages", "2"]])
def test_so_it_does_in_processes(more, folder):
    process = start([*TRAIN, *more, "--json"], folder, server=False)  # its own inherits where it prints
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 1
    assert err.count("in forward\n") > 2
    for words in FOLDERS:
        process = start([*words, "--json"], folder)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("place", "how", "function", "called"),
    [
        ("build", "sys.exit(0)", "build", "sys.exit(0)"),
        ("data", "sys.exit(0)", "data", "sys.exit(0)"),
        ("loss", "raise SystemExit('text')", "loss", "sys.exit('text')"),
        ("optimizer", "sys.exit(3)", "optimizer", "sys.exit(3)"),
        ("method", "raise SystemExit", "method", "sys.exit(None)"),
        ("forward", "sys.exit(1)", "Loud.forward", "sys.exit(1)"),
    ],
)
def test_one_that_ends_the_process_is_told(place, how, function, called, monkeypatch, capsys):
    Path("own.py").write_text(OWN.replace(f'act("{place}")', how))
    assert main(TRAIN) == 2
    told = capsys.readouterr().err
    assert f"stretto: own.py:{function} called {called} (" in told
    assert told.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[*TRAIN, "--stages", "2", "--workers", "2"], [*COMMANDS[1][:-2], "--out", "run"]])
def test_one_that_ends_a_worker_is_told(words, folder):
    """A process of a run, and one of a study's."""
    Path("own.py").write_text(OWN.replace('act("forward")', "self.training and sys.exit(0)"))
    process = start(words, folder)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "own.py:Loud.forward called sys.exit(0)" in err
    assert "Traceback" not in err


def test_its_interrupt_interrupts_the_command(capsys):
    Path("own.py").write_text(OWN.replace('act("loss")', "raise KeyboardInterrupt('mine')"))
    assert main(TRAIN) == 130
    assert "mine" in capsys.readouterr().err
