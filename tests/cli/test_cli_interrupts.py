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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups"),
]

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32", "--lr", "0.05"]
TRAIN = ["train", *SMALL, "--steps", "100000", "--out", "run"]
STUDY = ["compare", *SMALL, "--methods", "greedy,backprop", "--seeds", "1", "--steps", "40000", "--out", "s"]
MOMENTS = range(0, 3001, 50)  # milliseconds after the start; an idle machine trains by then
PROGRESS = re.compile(r".*: \d+ %.*|finished runs appear in .*")
OURS = str(Path(stretto.__file__).parent)
NOTHING_KEPT = ("interrupted", "interrupted before a checkpoint; nothing is kept, the same command begins again")
KEPT = "interrupted; the same command with --resume goes on from the checkpoint of step "
STUDY_KEPT = "interrupted; finished runs are kept, the same command makes the others"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_interrupted_at_any_moment(tmp_path, moment, workers, number):
    """A terminal's Ctrl-C comes to all processes, and so may SIGTERM; at every other moment to the first alone."""
    whole_group = moment % 100 == 0
    said = interrupted([*TRAIN, "--workers", str(workers)], tmp_path, number, moment / 1000, whole_group=whole_group)
    assert said is None or said in NOTHING_KEPT or said.startswith(KEPT)
    kept = {".run.checkpoints", ".run.partial"} if said is not None and said.startswith(KEPT) else set()
    assert {path.name for path in tmp_path.iterdir()} == {"scratch", *kept}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [TRAIN, [*STUDY, "--jobs", "2"], [*STUDY, "--jobs", "1"]], ids=["run", "two", "one"])
@pytest.mark.parametrize("moment", MOMENTS[::5])
def test_others_interrupted_at_any_moment(tmp_path, moment, words, number):
    """A run in the command's own process, and a study with processes and without."""
    said = interrupted(words, tmp_path, number, moment / 1000, whole_group=moment % 500 == 0)
    expected = [STUDY_KEPT] if words[0] == "compare" else NOTHING_KEPT
    assert said is None or said in expected or (words is TRAIN and said.startswith(KEPT))


def interrupted(words, folder, number, seconds, *, whole_group):
    """What a fresh process says when it is sent a signal so long after its start; None if it was not yet Stretto's."""
    (folder / "scratch").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": short(folder / "scratch")}
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *words], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        time.sleep(seconds)
        begun = any((folder / "scratch").iterdir())
        (os.killpg if whole_group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=120)  # of a machine with much else to do
        assert group_ends(process.pid), "a process has stayed behind"
    finally:
        if not group_ends(process.pid, 0):
            os.killpg(process.pid, signal.SIGKILL)
    assert out == ""
    assert left(folder) == []
    by_python = process.returncode == -number or "KeyboardInterrupt" in err
    if by_python and not begun and OURS not in err and "stretto: " not in err:
        return None  # it was starting itself
    assert process.returncode == 130, err
    (said,) = (line for line in err.splitlines() if not PROGRESS.fullmatch(line))
    assert said.startswith("stretto: ")
    return said.removeprefix("stretto: ")


def group_ends(group, seconds=20):
    until = time.monotonic() + seconds
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
