"""Every fiftieth of a second of a start is interrupted: one line and the right status, nothing left, never silence."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stretto
from cli.processes import left, short

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups")]

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32", "--lr", "0.05"]
TRAIN = ["train", *SMALL, "--steps", "100000", "--out", "run"]
STUDY = ["compare", *SMALL, "--methods", "greedy,backprop", "--seeds", "1", "--steps", "40000", "--out", "s"]
MOMENTS = range(0, 3001, 50)  # milliseconds after the start; an idle machine trains by then
PROGRESS = re.compile(r".*: \d+ %.*|finished runs appear in .*")
OURS = str(Path(stretto.__file__).parent)
NOTHING_KEPT = ("interrupted", "interrupted before a checkpoint; nothing is kept, the same command begins again")
KEPT = "interrupted; the same command with --resume goes on from the checkpoint of step "
STUDY_KEPT = "interrupted; finished runs are kept, the same command makes the others"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_interrupted_at_any_moment(tmp_path, moment, workers):
    """A terminal's Ctrl-C comes to all processes, and so may SIGTERM; at every other moment to the first alone."""
    words = [*TRAIN, "--workers", str(workers)]
    for said, folder in interrupted(words, tmp_path, moment, whole_group=moment % 100 == 0):
        assert said is None or said in NOTHING_KEPT or said.startswith(KEPT)
        kept = {".run.checkpoints", ".run.partial"} if said is not None and said.startswith(KEPT) else set()
        assert {path.name for path in folder.iterdir()} == {"scratch", *kept}


@pytest.mark.parametrize("words", [TRAIN, [*STUDY, "--jobs", "2"], [*STUDY, "--jobs", "1"]], ids=["run", "two", "one"])
@pytest.mark.parametrize("moment", MOMENTS[::5])
def test_others_interrupted_at_any_moment(tmp_path, moment, words):
    """A run in the command's own process, and a study with processes and without."""
    for said, _ in interrupted(words, tmp_path, moment, whole_group=moment % 500 == 0):
        expected = [STUDY_KEPT] if words[0] == "compare" else NOTHING_KEPT
        assert said is None or said in expected or (words is TRAIN and said.startswith(KEPT))


def interrupted(words, folder, milliseconds, *, whole_group):
    """Two fresh processes, sent one signal each so long after their start: for each what it says, and its folder."""
    started = [(number, *fresh(words, folder / number.name)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        time.sleep(milliseconds / 1000)
        begun = [any((own / "scratch").iterdir()) for _, _, own in started]
        for number, process, _ in started:
            (os.killpg if whole_group else os.kill)(process.pid, number)
        return [(ending(*each, begun=so), each[2]) for each, so in zip(started, begun, strict=True)]
    finally:
        for _, process, _ in started:
            if not group_ends(process.pid, 0):
                os.killpg(process.pid, signal.SIGKILL)


def fresh(words, folder):
    """A process that imports all that it needs itself, unlike those that other tests fork; and its folder."""
    (folder / "scratch").mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": short(folder / "scratch")}
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *words], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return process, folder


def ending(number, process, folder, *, begun):
    """What a process says at its end; None if Python itself was still starting."""
    out, err = process.communicate(timeout=120)  # of a machine with much else to do
    assert group_ends(process.pid, 20), "a process has stayed behind"
    assert out == ""
    assert left(folder) == []
    by_python = process.returncode == -number or "KeyboardInterrupt" in err
    if by_python and not begun and OURS not in err and "stretto: " not in err:
        return None
    assert process.returncode == 130, err
    said = [line for line in err.splitlines() if not PROGRESS.fullmatch(line)]
    assert len(said) == 1, err
    assert said[0].startswith("stretto: ")
    return said[0].removeprefix("stretto: ")


def group_ends(group, seconds):
    until = time.monotonic() + seconds
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
