"""stretto train --workers: processes that it starts itself, the numbers of emulation, and clean ends."""

import json
import os
import signal
import sys

import pytest
import safetensors.torch
import torch
from processes import alive, descendants, gone, left, listening, start, wait_for

from stretto.cli import main
from stretto.study import read_study

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32", "--evaluations", "3"]
LONG = ["train", *SMALL[:-1], "1000", "--method", "pb", "--steps", "1000000", "--workers", "2", "--out", "run"]
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


RUNNING = []


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    for process in RUNNING:  # their workers end with them
        process.kill()
    RUNNING.clear()


def train(capsys, *words):
    assert main(["train", *SMALL, "--steps", "30", "--json", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def record(out):
    (found,) = read_study(out).records()
    return found


def same_weights(one, other):
    weights = safetensors.torch.load_file(one / "model.safetensors")
    others = safetensors.torch.load_file(other / "model.safetensors")
    assert list(weights) == list(others)
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def without_seconds(points):
    return [{**point.to_json(), "seconds": None, "serial_flops": None} for point in points]


def test_the_numbers_of_emulation(capsys, tmp_path):
    alone = train(capsys, "--method", "pb", "--out", "alone")
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    many = train(capsys, "--method", "pb", "--out", "many", "--workers", "2")
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    measured = ("out", "seconds_per_step", "serial_flops")
    assert {k: v for k, v in many.items() if k not in measured} == {k: v for k, v in alone.items() if k not in measured}
    assert without_seconds(record(tmp_path / "many").points) == without_seconds(record(tmp_path / "alone").points)
    same_weights(tmp_path / "alone", tmp_path / "many")
    events = [
        [json.loads(line) for line in (tmp_path / "many" / f"worker-{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    ]
    assert [each[0]["stages"] for each in events] == [[0, 1], [2]]
    assert [[event["event"] for event in each] for each in events] == [["start", *["evaluation"] * 3, "end"]] * 2
    assert train(capsys, "--method", "pb", "--out", "many", "--workers", "2") == many  # it is finished already
    assert main(["train", *SMALL, "--steps", "30", "--method", "pb", "--out", "many"]) == 2
    assert "workers: 2 there, None here" in capsys.readouterr().err


def test_under_torchrun(capsys, tmp_path):
    words = ["train", *SMALL, "--steps", "30", "--method", "1f1b", "--out", "many"]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    process = start(
        [*words, "--json"], tmp_path, launcher=(*torchrun, "--rdzv-endpoint", "localhost:0", "-m", "stretto")
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == 30
    train(capsys, "--method", "1f1b", "--out", "alone")
    same_weights(tmp_path / "alone", tmp_path / "many")
    assert record(tmp_path / "many").seconds > 0


def started(folder, words=LONG):
    """A command whose workers train, and their process ids."""
    process = start(words, folder)
    RUNNING.append(process)
    wait_for(lambda: all((folder / ".run.partial" / f"worker-{rank}.jsonl").exists() for rank in (0, 1)), process)
    wait_for(lambda: "evaluation" in (folder / ".run.partial" / "worker-1.jsonl").read_text(), process)
    workers = descendants(process.pid)
    assert len(workers) == 2
    return process, workers


def clean(folder, workers):
    assert gone(workers)
    assert left(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["scratch"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run(tmp_path, how):
    process, workers = started(tmp_path)
    assert listening([process.pid, *workers]) <= LOOPBACK
    assert listening([process.pid, *workers])
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1].startswith("stretto: interrupted")
    assert "Traceback" not in err
    clean(tmp_path, workers)


def test_a_worker_that_is_killed(tmp_path):
    process, workers = started(tmp_path)

    os.kill(workers[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    said = [line for line in err.splitlines() if "%" not in line]
    assert said == [
        f"stretto: worker 1 (process id {workers[1]}) was ended by SIGKILL; the machine may be short of memory"
    ]
    clean(tmp_path, workers)


def test_no_orphans_when_the_command_is_killed(tmp_path):
    process, workers = started(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert gone(workers)
    assert not any(alive(pid) for pid in workers)
