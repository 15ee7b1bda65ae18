"""Launchers' variables."""

import os
import sys
import tempfile
from datetime import timedelta

import pytest

from runtime import scripts
from runtime.nursery import Forked
from runtime.processes import free_port, launch
from stretto.errors import UsageError
from stretto.runtime.failure import WorkerLostError
from stretto.runtime.world import difference, first_host, from_slurm, join, take_place


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node3", "node3"), ("gpu[07-09,12],login1", "gpu07"), ("a1,b2", "a1"), ("n[3],m", "n3"), ("r1n[10-20]", "r1n10")],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_srun_with_several_tasks_is_a_job():
    given = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[5-6]",
             "SLURM_JOB_ID": "40007"}  # fmt: skip
    made = from_slurm(given)
    assert (made["WORLD_SIZE"], made["RANK"], made["LOCAL_RANK"]) == ("4", "2", "1")
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("n5", "20007")
    assert from_slurm({**given, "MASTER_PORT": "99"})["MASTER_PORT"] == "99"


@pytest.mark.parametrize(
    "given", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "8"}]
)
def test_alone(given):
    assert join(given) is None


def test_variables_that_do_not_fit():
    with pytest.raises(UsageError, match="RANK is not set: start it with torchrun --nproc-per-node 2"):
        join({"WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="WORLD_SIZE='many'"):
        join({"WORLD_SIZE": "many"})


SLURM = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "localhost"}


@pytest.mark.parametrize(
    ("given", "missed", "remedy"),
    [
        ({"WORLD_SIZE": "3", "RANK": "0"}, "workers 1, 2 have not connected within 1 s", "start 3 processes"),
        ({"WORLD_SIZE": "3", "RANK": "2"}, "worker 0 has not been reached at 127.0.0.1", "start 3 processes"),
        (SLURM, "workers 1, 2 have not connected within 1 s", "start it with srun; for this process alone"),
    ],
    ids=["the first", "another", "an interactive step"],
)
def test_those_who_never_come_are_named_in_time(given, missed, remedy, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # joining sets them
    with pytest.raises(WorkerLostError, match=missed) as raised:
        join({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **given}, timedelta(seconds=1))
    assert remedy in raised.value.__notes__[0]


def test_differences_are_named():
    assert difference(b'{"seed": 0, "a": 1}', b'{"seed": 1, "a": 1}') == "seed is 0 on rank 0 and 1 there"


def test_tasks_of_srun_come_to_the_numbers_of_emulation():
    told = launch(2, "runtime.scripts:as_tasks_of_srun", "pb")
    losses, weights, evaluated = scripts.train("pb", workers=2)
    assert all((each[0], each[2]) == (losses, evaluated) for each in told)
    assert scripts.same(told[0][1], weights)


FORKS = ("--run-path", "--start-method", "forkserver")


@pytest.mark.parametrize("how", [FORKS, pytest.param((), marks=pytest.mark.slow)], ids=["forks", "processes"])
def test_torchrun_may_start_all_again(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *how]
    with tempfile.TemporaryDirectory() as folder:  # torch leaves files there
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        launcher = Forked([sys.executable, *command, str(script)], environment)
        try:
            launcher.wait(120)
        finally:
            launcher.kill()
            out, err = launcher.communicate()
    assert launcher.returncode == 0, err[-3000:]
    assert out.count("trained") == 2


RESTARTED = """
import os
import torch
from torch import nn
import stretto

torch.manual_seed(0)  # all processes pass the same batches
trainer = stretto.Trainer(
    [nn.Linear(4, 4), nn.Linear(4, 2)], nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), "gpipe"
)
trainer.step(torch.randn(6, 4), torch.randint(2, (6,)))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.rank == 1:
    os.kill(os.getpid(), 9)
trainer.step(torch.randn(6, 4), torch.randint(2, (6,)))
trainer.flush()
print("trained")
"""


@pytest.mark.parametrize(
    ("placement", "ranks", "local"), [((1, 0), ["1", "0"], ["0", "1"]), ((5, 2), ["1", "0"], ["2", "5"])]
)
def test_a_process_takes_the_place_of_its_worker(monkeypatch, placement, ranks, local):
    """Ranks are places in the placement; a launcher's processes are its workers in ascending order."""
    for started in (0, 1):
        given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(started), "LOCAL_RANK": str(started)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        take_place(placement)
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (ranks[started], local[started])


def test_places_that_cannot_be_taken(monkeypatch):
    take_place((1,))  # alone
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "far"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="placement=1,0,2, but 2 processes have been started: start 3"):
        take_place((1, 0, 2))
    with pytest.raises(UsageError, match="placement=1,0: process 0 has to run where this launcher expects rank 0"):
        take_place((1, 0))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    take_place((1, 0))
    assert os.environ["RANK"] == "1"
