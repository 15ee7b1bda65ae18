"""The script behind `make gpu`, without a GPU: it says so, and on the stand-in all of it runs."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpu import checks, figures
from runtime.nursery import Forked
from stretto.nn import devices

SCRIPT = Path(__file__).with_name("run.py")


def run(*words):
    known = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    process = Forked([sys.executable, str(SCRIPT), *words], {**os.environ, "PYTHONPATH": known})
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


@pytest.mark.skipif(devices.accelerator() is not None, reason="there is one")
def test_without_one_nothing_passes():
    status, said = run()
    assert status == 2
    assert "No accelerator here" in said


@pytest.mark.slow
def test_every_check_runs_on_the_stand_in(tmp_path):
    status, said = run("--stand-in", "--out", str(tmp_path / "result.json"))
    assert status == 0, said
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["checks"]) == [check.__name__ for check in checks.CHECKS]
    assert list(result["figures"]) == [figure.__name__ for figure in figures.FIGURES]


def test_a_check_that_fails_is_named(tmp_path, monkeypatch, capsys):
    from gpu.run import result

    def breaks(tiny):
        raise ValueError("no")

    assert result(breaks, True) == (False, "ValueError: no")
    assert capsys.readouterr().out == "FAIL  breaks: ValueError: no\n"
