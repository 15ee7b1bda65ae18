"""Jobs that fail: what is said of them, and that they are started again."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from runtime.nursery import Forked
from runtime.processes import ended, free_port
from stretto.runtime.launch import reason

NODE = str(Path(__file__).with_name("node.py"))


def test_a_worker_killed_on_another_node_is_started_again(tmp_path):
    """Both nodes are this machine. Launchers count their restarts differently; stores have to be new all the same.

    `cli/kills.py --nodes 2` trains so.
    """
    command = [sys.executable, NODE, str(free_port()), str(tmp_path)]
    statuses, _ = ended([Forked(command, dict(os.environ)) for _ in range(2)], 90)
    assert statuses == [0, 0]
    assert {path.name: path.read_text() for path in tmp_path.glob("sum-*")} == {"sum-0": "4.0", "sum-1": "4.0"}


@pytest.mark.parametrize("exitcode", [1, -signal.SIGTERM])
def test_what_a_worker_has_said_counts_also_if_it_was_told_to_end_before_it_had(tmp_path, exitcode):
    said = tmp_path / "error"
    said.write_text(json.dumps({"message": "no room", "kind": "FullDiskError", "timestamp": "5"}))
    silent = ProcessFailure(local_rank=1, pid=11, exitcode=1, error_file=str(tmp_path / "none"))
    spoke = ProcessFailure(local_rank=0, pid=10, exitcode=exitcode, error_file=str(said))
    error = reason({0: spoke, 1: silent})
    assert (str(error), error.kind) == ("no room", "FullDiskError")
