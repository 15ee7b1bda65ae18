"""stretto train --workers: processes that it starts itself, the numbers of emulation, and clean ends."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cli.kills import survives
from cli.processes import alive, descendants, forks, gone, left, listening, start
from stretto.cli import main
from stretto.nn.devices import name_of, pick_device
from stretto.study import read_study
from waiting import wait_for

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


def train(capsys, *words, steps="30"):
    assert main(["train", *SMALL, "--steps", steps, "--json", *words]) == 0
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
    words = ("--method", "pb", "--measure", "sharpness,noise,cosine,probes,filters")
    alone = train(capsys, *words, "--out", "alone", steps="9")
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    many = train(capsys, *words, "--out", "many", "--workers", "2", steps="9")
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    measured = ("out", "seconds_per_step", "serial_flops", "peak_memory")
    assert {k: v for k, v in many.items() if k not in measured} == {k: v for k, v in alone.items() if k not in measured}
    assert without_seconds(record(tmp_path / "many").points) == without_seconds(record(tmp_path / "alone").points)
    same_weights(tmp_path / "alone", tmp_path / "many")
    assert record(tmp_path / "many").measurements == record(tmp_path / "alone").measurements
    events = [
        [json.loads(line) for line in (tmp_path / "many" / f"worker-{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    ]
    assert [each[0]["stages"] for each in events] == [[0, 1], [2]]
    assert [[event["event"] for event in each] for each in events] == [["start", *["evaluation"] * 3, "end"]] * 2
    assert train(capsys, *words, "--out", "many", "--workers", "2", steps="9") == many  # it is finished already
    assert main(["train", *SMALL, "--steps", "9", *words, "--out", "many"]) == 2
    assert "workers: 2 there, None here" in capsys.readouterr().err


@pytest.mark.slow
def test_replicas(capsys, tmp_path):
    words = ("--method", "pb", "--data-parallel", "2", "--sync", "local-sgd(every=4)", "--threads", "2")
    alone = train(capsys, *words, "--out", "alone")
    assert main(["train", *SMALL, "--steps", "30", *words, "--out", "many", "--workers", "4"]) == 0
    told = capsys.readouterr().out
    assert "data 2 x pipeline 2 = 4 processes\n" in told
    assert "process 3: replica 1, worker 1 (stage 2)\n" in told
    assert train(capsys, *words, "--out", "many", "--workers", "4")["train_loss"] == alone["train_loss"]
    assert without_seconds(record(tmp_path / "many").points) == without_seconds(record(tmp_path / "alone").points)
    same_weights(tmp_path / "alone", tmp_path / "many")
    run = json.loads((tmp_path / "many" / "run.json").read_text())
    assert run["mesh"] == {"data": 2, "pipeline": 2, "tensor": 1, "height": 1, "width": 1}
    assert run["settings"]["sync"] == "local-sgd(every=4)"
    assert (run["record"]["device"], run["record"]["threads"]) == (name_of(pick_device("auto")), 2)
    assert main(["report", "many", "--quiet"]) == 0
    assert "on 4 processes" in (tmp_path / "many" / "report.html").read_text()
    (first, *_) = (tmp_path / "many" / "worker-3.jsonl").read_text().splitlines()
    assert {key: json.loads(first)[key] for key in ("replica", "worker", "stages")} == {
        "replica": 1,
        "worker": 1,
        "stages": [2],
    }


@pytest.mark.slow
def test_shared_weights(capsys, tmp_path):
    words = ("--method", "pb", "--tensor", "2")
    alone = train(capsys, *words, "--out", "alone")
    assert main(["train", *SMALL, "--steps", "30", *words, "--out", "many", "--workers", "4"]) == 0
    told = capsys.readouterr().out
    assert "data 1 x pipeline 2 x tensor 2 = 4 processes\n" in told
    assert "process 3: replica 0, worker 1, tensor 1 (stage 2)\n" in told
    many = train(capsys, *words, "--out", "many", "--workers", "4")
    assert many["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    one, two = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("alone", "many"))
    assert all(torch.allclose(one[key], two[key], rtol=0, atol=1e-5) for key in one)
    assert one.keys() == two.keys()


@pytest.mark.slow
def test_replicas_that_share_out_their_weights(capsys, tmp_path):
    words = ("--method", "1f1b", "--data-parallel", "2", "--sync", "fully-shard", "--checkpoint-every", "10")
    alone = train(capsys, *words, "--out", "alone")
    many = train(capsys, *words, "--out", "many", "--workers", "2")
    assert many["train_loss"] == alone["train_loss"]
    same_weights(tmp_path / "alone", tmp_path / "many")


@pytest.mark.slow
def test_replicas_with_a_parameter_server(capsys, tmp_path):
    """The order of updates is not that of the emulation, but it is written, with the staleness of each."""
    words = ("--data-parallel", "2", "--sync", "parameter-server(staleness=2)")
    alone = train(capsys, *words, "--out", "alone")
    many = train(capsys, *words, "--out", "many", "--workers", "2")
    assert many["train_loss"] == pytest.approx(alone["train_loss"], rel=0.3)
    for out in ("alone", "many"):
        events = [json.loads(line) for line in (tmp_path / out / "events.jsonl").read_text().splitlines()]
        (order,) = (event["stages"] for event in events if event["event"] == "order")
        assert list(order) == ["0", "1", "2"]
        for each in order.values():
            assert len(each["replica"]) == len(each["staleness"]) == 2 * 30
            assert max(each["staleness"]) <= 2


@pytest.mark.slow
def test_under_torchrun(capsys, tmp_path):
    words = ["train", *SMALL, "--steps", "30", "--method", "1f1b", "--out", "many", "--json"]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    process = start(words, tmp_path, launcher=(*torchrun, "--rdzv-endpoint", "localhost:0", "-m", "stretto"))
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
    workers = forks(process.pid)
    assert len(workers) == 2
    return process, workers


def clean(folder, workers):
    assert gone(workers)
    assert left(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["scratch"]


def test_an_interrupted_run(tmp_path):
    process, workers = started(tmp_path)
    assert listening([process.pid, *workers]) <= LOOPBACK
    assert listening([process.pid, *workers])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "stretto: interrupted; the same command with --resume goes on from the checkpoint of step" in err
    assert err.splitlines()[-1].endswith("--out run --resume")
    assert "Traceback" not in err
    assert gone(workers)
    assert left(tmp_path) == []
    (saved,) = (tmp_path / ".run.checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) > 0


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


TRACED = """
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return (x, x), (x, x)
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_semaphore(tmp_path):
    """torch.fx, which cuts the network, takes a lock of tqdm's, and Python warned of it at the command's end."""
    (tmp_path / "own.py").write_text(TRACED)
    words = ["--model", "own.py:Residual", "--data", "own.py:data", "--loss", "mse_loss", "--stages", "2"]
    process, workers = started(
        tmp_path, ["train", *words, "--steps", "9999", "--out", "run", "--workers", "2", "--quiet"]
    )
    os.kill(workers[1], signal.SIGKILL)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert [line for line in err.splitlines() if "%" not in line] == [
        f"stretto: worker 1 (process id {workers[1]}) was ended by SIGKILL; the machine may be short of memory"
    ]


def test_no_orphans_when_the_command_is_killed(tmp_path):
    process, workers = started(tmp_path)
    process.kill()
    err = process.communicate(timeout=60)[1]
    assert gone(workers)
    assert not any(alive(pid) for pid in workers)
    assert [line for line in err.splitlines() if "%" not in line] == [], "no trace of torch's, no semaphores"


def test_no_orphans_when_the_command_is_killed_while_it_starts_workers(tmp_path):
    """They had nobody to miss yet but the fork server, which waited for them; the next command clears up."""
    process = start(LONG, tmp_path)
    RUNNING.append(process)
    wait_for(lambda: forks(process.pid), process)
    started = descendants(process.pid)
    process.kill()
    process.communicate(timeout=60)
    assert gone(started)
    assert left(tmp_path)
    again = start(["train", *SMALL, "--steps", "3", "--workers", "1", "--out", "run"], tmp_path)
    err = again.communicate(timeout=60)[1]
    assert again.returncode == 0, err
    assert left(tmp_path) == []


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(tmp_path):
    """`kills.py` does it many times, by hand."""
    assert survives(tmp_path, "pb-lwp-sc", steps=200, every=20, kills=1, rng=random.Random(1)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "scratch", "undisturbed"]
    assert left(tmp_path) == []
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "worker-1.jsonl").read_text().splitlines()]
    assert (events[0], events[-1]) == ("start", "end")


@pytest.mark.slow
def test_a_worker_that_hangs_costs_an_attempt(capsys, tmp_path):
    """It is ended with the attempt, without half a minute's wait for a SIGTERM that a stopped process never hears."""
    words = ["train", *SMALL, "--method", "1f1b", "--steps", "300", "--checkpoint-every", "50", "--quiet"]
    process, workers = started(
        tmp_path, [*words, "--out", "run", "--workers", "2", "--timeout", "8", "--restarts", "3"]
    )
    os.kill(workers[1], signal.SIGSTOP)
    began = time.monotonic()
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 0, err
    assert time.monotonic() - began < 30 + 8  # torch's own patience comes on top of ours
    assert gone(workers)
    assert main([*words, "--out", "undisturbed"]) == 0
    same_weights(tmp_path / "undisturbed", tmp_path / "run")


@pytest.mark.slow
def test_sigterm_saves_and_another_number_of_workers_goes_on(capsys, tmp_path):
    words = ["train", *SMALL[:-1], "50", "--method", "1f1b", "--steps", "200", "--out", "run"]
    process, workers = started(tmp_path, [*words, "--workers", "2", "--checkpoint-every", "10000"])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    (saved,) = (tmp_path / ".run.checkpoints").iterdir()
    step = saved.name.removeprefix("step-")
    last = err.splitlines()[-1]
    told = f"stretto: interrupted; the same command with --resume goes on from the checkpoint of step {step}: stretto "
    assert last == told + shlex.join([*words, "--workers", "2", "--checkpoint-every", "10000", "--resume"])
    assert (process.returncode, out) == (130, "")
    assert gone(workers)
    assert left(tmp_path) == []
    forgotten = [*words, "--checkpoint-every", "10000"]
    assert main(forgotten) == 2
    assert f"holds a checkpoint of step {step}" in capsys.readouterr().err
    assert main([*words, "--checkpoint-every", "7", "--resume"]) == 2
    assert "checkpoint_every: 10000 there, 7 here" in capsys.readouterr().err
    assert main([*forgotten, "--resume"]) == 0
    assert main([*words[:-1], "alone"]) == 0
    same_weights(tmp_path / "alone", tmp_path / "run")  # 1f1b drains at each step anyway
    assert len(record(tmp_path / "run").points) == len(record(tmp_path / "alone").points)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "run", "scratch"]


MISTAKES = {
    "--workers 9": "workers=9 for 3 stages",
    "--restarts 2": "give --workers, too",
    "--workers 2 --restarts -1": "restarts=-1: choose 0 or more",
    "--workers 3 --nodes 2 --rendezvous a:1": "workers=3 on nodes=2: each node takes as many as any other",
    "--workers 2 --nodes 2": "nodes=2: say where they meet, --rendezvous HOST:PORT",
    "--workers 2 --rendezvous here": "rendezvous='here': write it as HOST:PORT",
    "--workers 2 --rendezvous 0.0.0.0:29400": "stands for all interfaces",
    "--workers 2 --secret-file here": "--secret-file here: it is for nodes that meet; give --rendezvous",
    "--workers 2 --nodes 2 --rendezvous a:1 --secret-file here": "--secret-file here: it cannot be read as text",
    "--timeout 5": "--timeout 5: it is for processes that wait for each other; give --workers, too",
    "--workers 2 --timeout 0": "timeout=0: choose a number of seconds above 0",
    "--workers 2 --timeout nan": "timeout=nan: choose a number of seconds above 0",
    "--checkpoint-every 0": "checkpoint_every=0",
    "--workers 3 --data-parallel 2": "each replica takes as many processes as any other; choose workers=4",
    "--workers 8 --data-parallel 2": "workers=8 for 3 stages of each of 2 replicas: use at most 6 workers",
    "--data-parallel 0": "data_parallel=0: choose a whole number of at least 1",
    "--data-parallel 40": "batch_size=32 for data_parallel=40: each replica needs an example of its own",
    "--data-parallel 12 --method 1f1b": "micro-batches for each of 12 replicas, and batch_size=32",
    "--sync local": "unknown sync 'local'",
    "--workers 6 --data-parallel 2 --tensor 2": "workers=6 for data-parallel 2 x tensor 2: the axes, with the pipeline",
    "--workers 16 --tensor 2": "workers=16 for 3 stages, each shared by 2: use at most 6 workers",
    "--workers 6 --tensor 2 --space 2,1": "workers=6 for tensor 2 x height 2: the axes, with the pipeline's, multiply",
    "--space 2": "space=(2,): give two numbers, along height and width",
    "--tensor 0": "tensor=0: choose a whole number of at least 1",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_said_before_a_process_starts(capsys, tmp_path, words):
    assert main(["train", *SMALL, *words.split()]) == 2
    assert MISTAKES[words] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("plain_pages")
def test_a_study_on_processes(capsys, tmp_path):
    words = ["compare", *SMALL, "--methods", "greedy", "--seeds", "1", "--lr", "0.05", "--steps", "20", "--out", "s"]
    assert main([*words, "--workers", "2", "--jobs", "2"]) == 2
    assert "runs on several processes go one after the other" in capsys.readouterr().err
    assert main([*words, "--workers", "2", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["status"] == "finished"
    assert (tmp_path / "s" / "runs" / "greedy-lr0.05-b32-s0" / "worker-1.jsonl").is_file()


def test_a_full_disk_keeps_the_last_checkpoint(capsys, small_disk):
    """Where one checkpoint of half a megabyte fits, a second does not."""
    words = ["train", "--model-options.width", "160", "--model-options.depth", "3", "--method", "pb", "--steps", "30"]
    words += ["--evaluations", "3", "--quiet", "--checkpoint-every", "10"]
    assert main([*words, "--workers", "2", "--out", str(small_disk / "run")]) == 1
    said = capsys.readouterr().err
    assert "no room on the disk" in said
    assert "the same command with --resume goes on from the checkpoint of step 10" in said
    assert "Traceback" not in said
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert main([*words, "--out", str(small_disk / "run"), "--resume"]) == 0
    assert main([*words, "--out", "undisturbed"]) == 0
    same_weights(Path("undisturbed"), small_disk / "run")
