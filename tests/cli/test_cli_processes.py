"""Ctrl-C, SIGTERM and a closed stdout, on a real process: quick end, one message, no orphans, and the way back."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from cli.processes import descendants, forks, gone, left, start
from stretto.cli import main
from waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups")

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32"]
LAST_STEP = """
import time
from pathlib import Path

seen = []


def slow(output, target):
    seen.append(0)
    if len(seen) > 3:  # batches: three are the validation split's, and those of the test split follow
        Path("test-split").touch()
        time.sleep(0.5)
    return output.sum(), output.numel()  # of a mean halves would be looked at, too
"""
DEADLY = """
import os
import signal
from pathlib import Path


def deadly(output, target):
    if not Path("before").exists():
        Path("before").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not Path("after").exists() and any(Path().glob(".run.checkpoints/step-*")):
        Path("after").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return output.mean()
"""
AGAIN = [
    "train",
    *SMALL,
    "--steps",
    "30",
    "--checkpoint-every",
    "10",
    "--metric",
    "deadly=own.py:deadly",
    "--auto-resume",
]
STUDY = ["compare", *SMALL, "--methods", "greedy,backprop", "--seeds", "1", "--lr", "0.05", "--steps", "4000"]


def group_is_empty(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def end(process, how, *, whole_group):
    told = "stretto: interrupted; finished runs are kept, the same command makes the others"
    assert ended(process, how, whole_group=whole_group) == told


def ended(process, how, *, whole_group):
    (os.killpg if whole_group else os.kill)(process.pid, how)
    out, err = process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while not group_is_empty(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_is_empty(process.pid), "a process has stayed behind"
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    ("how", "whole_group", "jobs"),
    [
        (signal.SIGINT, True, "2"),
        pytest.param(signal.SIGINT, False, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, "1", marks=pytest.mark.slow),
        (signal.SIGTERM, False, "2"),
    ],
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


@pytest.mark.slow
def test_an_interrupted_run(tmp_path):
    """It keeps a checkpoint, and the command that it says goes on from there."""
    words = ["train", *SMALL, "--steps", "4000", "--out", "run"]
    process = start(words, tmp_path)
    events = tmp_path / ".run.partial" / "events.jsonl"
    wait_for(lambda: events.exists() and "evaluation" in events.read_text(), process)
    said = ended(process, signal.SIGINT, whole_group=True)
    (saved,) = (tmp_path / ".run.checkpoints").iterdir()
    command = shlex.join(["stretto", *words, "--resume"])
    step = saved.name.removeprefix("step-")
    assert said == (
        f"stretto: interrupted; the same command with --resume goes on from the checkpoint of step {step}: {command}"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"scratch", ".run.checkpoints", ".run.partial"}
    assert left(tmp_path) == []
    for each in (shlex.split(command)[1:], [*words[:-1], "undisturbed"]):
        again = start(each, tmp_path)
        err = again.communicate(timeout=120)[1]
        assert again.returncode == 0, err
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "undisturbed"))
    assert one == other


@pytest.mark.parametrize("workers", [[], pytest.param(["--workers", "2"], marks=pytest.mark.slow)])
def test_a_run_that_has_made_its_last_step_is_finished(tmp_path, workers):
    (tmp_path / "own.py").write_text(LAST_STEP)
    words = ["train", *SMALL, "--metric", "slow=own.py:slow", "--steps", "3", "--evaluations", "1", "--out", "run"]
    process = start([*words, *workers], tmp_path)
    wait_for((tmp_path / "test-split").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "test_slow" in out
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"run.json", "model.safetensors"}
    assert not (tmp_path / ".run.checkpoints").exists()


def test_a_run_interrupted_before_its_first_step_says_that_nothing_is_kept(tmp_path):
    process = start(["train", *SMALL, "--steps", "100000", "--workers", "2", "--out", "run"], tmp_path)
    wait_for(lambda: forks(process.pid), process)
    assert ended(process, signal.SIGINT, whole_group=False) == (
        "stretto: interrupted before a checkpoint; nothing is kept, the same command begins again"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
    assert left(tmp_path) == []


def test_nothing_to_resume_is_a_mistake_that_names_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, "--steps", "5", "--out", "runs/one", "--resume"]) == 2
    assert capsys.readouterr().err == (
        "stretto: nothing to resume: runs/.one.checkpoints holds no checkpoint of the run to runs/one. Leave --resume "
        "out to begin, give --auto-resume to begin where there is nothing, or name the --out of the run that was "
        "interrupted\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert main(["train", *SMALL, "--steps", "5", "--out", "runs/one", "--quiet"]) == 0
    assert main(["train", *SMALL, "--steps", "5", "--out", "runs/one", "--resume"]) == 0  # it is finished


def killed(process):
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_auto_resume_begins_where_there_is_nothing_and_goes_on_where_there_is(tmp_path, monkeypatch, capsys):
    """The same command each time: killed before and after its first checkpoint, finished, and beside another's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(DEADLY)
    words = [*AGAIN, "--out", "run"]
    for _ in ("before a checkpoint", "after one"):
        killed(start(words, tmp_path))
    assert main(words) == 0
    assert "run: goes on from the checkpoint of step 10\n" in capsys.readouterr().out
    assert main(words) == 0
    assert "run: this run is finished already" in capsys.readouterr().out
    assert main([*AGAIN, "--out", "whole"]) == 0
    assert "whole: begins, for .whole.checkpoints holds no checkpoint\n" in capsys.readouterr().out
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(one[key], other[key]) for key in one | other)


def test_auto_resume_takes_no_checkpoint_of_another_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(DEADLY)
    (tmp_path / "before").touch()
    words = [*AGAIN, "--out", "run"]
    assert main([*words, "--resume"]) == 2
    assert "--resume and --auto-resume: give one of them" in capsys.readouterr().err
    killed(start(words, tmp_path))
    there = {path: path.read_bytes() for path in (tmp_path / ".run.checkpoints").rglob("*") if path.is_file()}
    for change in (["--lr", "0.5"], ["--seed", "3"], ["--method", "gpipe"], ["--stages", "2"], ["--momentum", "0.5"]):
        assert main([*words, *change]) == 2
        err = capsys.readouterr().err
        assert "holds checkpoints of a run with other settings" in err, err
    assert {path: path.read_bytes() for path in (tmp_path / ".run.checkpoints").rglob("*") if path.is_file()} == there


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "words", [["show", "greedy"], ["--help"], pytest.param(["doctor", "--json"], marks=pytest.mark.slow)]
)
def test_a_reader_that_leaves_early(tmp_path, words):
    command = [sys.executable, "-c", "import sys; from stretto.cli import main; sys.exit(main())", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # long before anything is written
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert err == ""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_modules_are_imported(tmp_path, name):
    """Importing runs `exec` on strings; what is interrupted in one must not end by the signal itself."""
    lines = f"import os, signal, time; os.kill(os.getpid(), signal.{name})\\ntime.sleep(60)"
    (tmp_path / "early.py").write_text(
        "import signal, sys\nfrom stretto.cli import program\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's processes ignore it\n"
        f'program.call = lambda words: exec("{lines}")\nsys.exit(program.main())\n'
    )
    found = subprocess.run([sys.executable, "-m", "early"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (130, "stretto: interrupted\n")
