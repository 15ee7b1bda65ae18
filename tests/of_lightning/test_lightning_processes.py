"""Several processes, started by Lightning or by torchrun: the numbers of one, to the bit; killed and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from late_imports import Late
from runtime.processes import ended, start

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")
lit_script = Late("lit_script")
SCRIPT = Path(__file__).with_name("lit_script.py")


def by_lightning(folder, *words, code=0):
    """Run the script on two devices: Lightning starts the second process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(SCRIPT), str(folder), "2", *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == code, run.stderr
    return told(folder)


def by_torchrun(folder, processes, *words):
    """Run the script as torchrun starts it."""
    elastic = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(SCRIPT), str(folder), str(processes), *words]
    statuses, said = ended(start(processes, command, extra=elastic), 200)
    assert statuses == [0] * processes, "\n".join(said)
    return told(folder)


def by_slurm(folder, *words):
    """Run the script as srun starts it on one node, once for each of two tasks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "SLURM_JOB_NAME": "job"}
    environment |= {f"SLURM_{name}": "2" for name in ("NTASKS", "NTASKS_PER_NODE")}
    environment |= {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), "2", *words]
    tasks = [
        subprocess.Popen(
            command, env={**environment, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}, stderr=subprocess.PIPE
        )
        for rank in "01"
    ]
    for task in tasks:
        _, said = task.communicate(timeout=200)
        assert task.returncode == 0, said.decode()
    return told(folder)


def alone(folder, *words):
    """Run the script in this process."""
    lit_script.main(folder, "1", *words)
    return told(folder)


def told(folder):
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]


@pytest.mark.slow
def test_killed_and_resumed_it_has_the_numbers_of_one_process(tmp_path):
    """Rank 0 is gone without a word in the third of four epochs; the same script goes on from its last checkpoint."""
    by_lightning(tmp_path, "pipedream", "4", "last", "15", code=-9)
    assert not told(tmp_path)
    first, second = by_torchrun(tmp_path, 2, "pipedream", "4", "last")
    assert first == second
    assert [first] == alone(tmp_path / "whole", "pipedream", "4", "none")


@pytest.mark.slow
def test_one_process_that_leaves_ends_the_other_long_before_its_timeout(tmp_path):
    by_lightning(tmp_path, "1f1b", "2", "leaves", "5", code=1)
    assert not told(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["1f1b", "pipedream", "greedy"])
def test_two_processes_draw_the_batches_of_one(tmp_path, method):
    (one,) = alone(tmp_path / "one", method, "2")
    first, second = by_lightning(tmp_path / "two", method, "2")
    assert first == second
    assert first == one
    logs = [(tmp_path / name / "lightning_logs" / "logs" / "metrics.csv").read_text() for name in ("one", "two")]
    assert logs[0] == logs[1]
    assert logs[0].count("\n") > 12


@pytest.mark.slow
def test_slurm_starts_processes_with_the_numbers_of_one(tmp_path):
    first, second = by_slurm(tmp_path / "two", "pipedream", "2")
    assert first == second
    assert [first] == alone(tmp_path / "one", "pipedream", "2")


@pytest.mark.slow
def test_replicas_on_four_processes(tmp_path):
    four = by_torchrun(tmp_path / "four", 4, "1f1b(microbatches=2)", "1", "", "-1", "2")
    assert four == alone(tmp_path / "one", "1f1b(microbatches=2)", "1", "", "-1", "2") * 4
