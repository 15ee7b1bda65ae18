"""Ctrl-C, SIGTERM and a closed stdout, on a real process: quick end, one message, no orphans, and the way back."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cli.processes import descendants, gone, left, start, wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups")

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32"]
STUDY = ["compare", *SMALL, "--methods", "greedy,backprop", "--seeds", "1", "--lr", "0.05", "--steps", "4000"]


def group_is_empty(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def end(process, how, *, whole_group):
    (os.killpg if whole_group else os.kill)(process.pid, how)
    out, err = process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while not group_is_empty(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_is_empty(process.pid), "a process has stayed behind"
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "stretto: interrupted; finished runs are kept, the same command makes the others"


@pytest.mark.parametrize(
    ("how", "whole_group", "jobs"),
    [(signal.SIGINT, True, "2"), (signal.SIGINT, False, "2"), (signal.SIGINT, True, "1"), (signal.SIGTERM, False, "2")],
)
def test_an_interrupted_study(tmp_path, how, whole_group, jobs):
    process = start([*STUDY, "--out", "s", "--jobs", jobs], tmp_path)
    wait_for(lambda: list(tmp_path.glob("s/runs/.*.partial/events.jsonl")), process)
    end(process, how, whole_group=whole_group)
    assert list(tmp_path.glob("s/runs/[!.]*")) == []


def test_ctrl_c_while_processes_start(tmp_path):
    process = start([*STUDY, "--out", "s", "--jobs", "2"], tmp_path)
    wait_for(lambda: (tmp_path / "s" / "study.json").exists(), process)
    time.sleep(0.2)  # they import torch now
    end(process, signal.SIGINT, whole_group=True)


def test_an_interrupted_run(tmp_path):
    process = start(["train", *SMALL, "--steps", "100000", "--out", "run"], tmp_path)
    wait_for(lambda: (tmp_path / ".run.partial" / "events.jsonl").exists(), process)
    end(process, signal.SIGINT, whole_group=True)
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
    assert left(tmp_path) == []


def test_a_killed_study_leaves_no_orphans_and_goes_on(tmp_path):
    words = [*STUDY[:-1], "300", "--out", "s", "--jobs", "2"]
    process = start(words, tmp_path)
    wait_for(lambda: list(tmp_path.glob("s/runs/.*.partial/events.jsonl")), process)
    children = descendants(process.pid)
    process.kill()
    process.communicate(timeout=30)
    assert gone(children)
    again = start([*words[:-1], "1"], tmp_path)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert "report: s/report.html" in out
    assert {path.name for path in (tmp_path / "s" / "runs").iterdir()} == {
        "greedy-lr0.05-b32-s0",
        "backprop-lr0.05-b32-s0",
    }


@pytest.mark.parametrize("words", [["show", "greedy"], ["doctor", "--json"], ["--help"]])
def test_a_reader_that_leaves_early(tmp_path, words):
    command = [sys.executable, "-c", "import sys; from stretto.cli import main; sys.exit(main())", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # long before anything is written
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert err == ""
