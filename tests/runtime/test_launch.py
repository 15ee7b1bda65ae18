"""Jobs that fail: what is said of them, and that they are started again."""

import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

import stretto
from runtime.nursery import Forked
from runtime.processes import ended, free_port
from stretto.errors import UsageError
from stretto.runtime.launch import LaunchSettings, WorkerFailedError, exit_reason, interrupted_by, launch
from stretto.runtime.world import join
from stretto.system import fork_server

NODE = str(Path(__file__).with_name("node.py"))


def test_a_worker_killed_on_another_node_is_started_again(tmp_path):
    """Both nodes are this machine. Launchers count their restarts differently; stores have to be new all the same.

    `cli/kills.py --nodes 2` trains so.
    """
    environment = {**os.environ, "STRETTO_SECRET": "a secret of this test"}
    command = [sys.executable, NODE, str(free_port()), str(tmp_path)]
    statuses, _ = ended([Forked(command, environment) for _ in range(2)], 90)
    assert statuses == [0, 0]
    assert {path.name: path.read_text() for path in tmp_path.glob("sum-*")} == {"sum-0": "4.0", "sum-1": "4.0"}


@pytest.mark.parametrize("exitcode", [1, -signal.SIGTERM])
def test_what_a_worker_has_said_counts_also_if_it_was_told_to_end_before_it_had(tmp_path, exitcode):
    said = tmp_path / "error"
    said.write_text(json.dumps({"message": "no room", "kind": "FullDiskError", "timestamp": "5"}))
    spoke = ProcessFailure(local_rank=0, pid=10, exitcode=exitcode, error_file=str(said))
    error = exit_reason(0, spoke)
    assert (str(error), error.kind) == ("no room", "FullDiskError")


def test_who_has_nothing_to_say_lets_others_be_heard_first():
    """Process 0 ends at once because process 1 fails, which needs some time to say why."""
    with pytest.raises(WorkerFailedError, match=r"^no room$") as caught:
        launch(one_fails, [0.5], LaunchSettings(workers=2))
    assert caught.value.kind == "UsageError"


def one_fails(seconds):
    if os.environ["RANK"] == "0":
        exec(compile("raise SystemExit(1)", stretto.__file__, "exec"))  # as the package does; users' exits are told
    time.sleep(seconds)
    raise UsageError("no room")


@pytest.mark.slow
def test_a_fork_server_that_is_lost_while_workers_start_is_a_failed_attempt(tmp_path, monkeypatch):
    prepare, read, times, stopped = fork_server.prepare, forkserver.read_signed, [1], []

    def stop():  # whoever looks finds it alive, and it answers nobody
        prepare()
        if times:
            times.pop()
            stopped.append(forkserver._forkserver._forkserver_pid)
            os.kill(stopped[0], signal.SIGSTOP)

    def lose(descriptor):  # where its answer is waited for
        while stopped:
            os.kill(stopped.pop(), signal.SIGKILL)
        return read(descriptor)

    monkeypatch.setattr(fork_server, "prepare", stop)
    monkeypatch.setattr(forkserver, "read_signed", lose)
    with pytest.raises(WorkerFailedError, match="the process from which workers are forked has gone"):
        launch(tell, [tmp_path], LaunchSettings(workers=2))
    assert list(tmp_path.iterdir()) == []
    times.append(1)
    launch(tell, [tmp_path], LaunchSettings(workers=2, restarts=1))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_restart_is_announced_with_its_reason(tmp_path, capsys):
    launch(fail_once, [tmp_path], LaunchSettings(workers=1, restarts=2))
    told = "stretto: worker 0 failed: ValueError: too warm; restart 1 of 2: all workers start again, from the newest"
    assert capsys.readouterr().err.count(told) == 1


def fail_once(folder):
    if not (folder / "tried").exists():
        (folder / "tried").write_text("")
        raise ValueError("too warm")


def test_a_worker_that_never_comes_is_named():
    with pytest.raises(
        WorkerFailedError, match=r"^worker 1 has not connected within 3 s: not started, hanging or gone$"
    ):
        launch(one_comes, [timedelta(seconds=3)], LaunchSettings(workers=2))


def one_comes(timeout):
    if os.environ["RANK"] == "1":
        time.sleep(100)
    join(timeout=timeout)


def test_processes_see_the_environment_of_now(monkeypatch, tmp_path):
    for value in ("one", "two"):
        monkeypatch.setenv("STRETTO_TEST", value)
        launch(tell, [tmp_path], LaunchSettings(workers=2))
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": value, "1": value}
    monkeypatch.delenv("STRETTO_TEST")
    launch(tell, [tmp_path], LaunchSettings(workers=1))
    assert (tmp_path / "0").read_text() == "None"


def tell(folder):
    (folder / os.environ["RANK"]).write_text(str(os.environ.get("STRETTO_TEST")))


def test_signals_and_logs_are_as_before():
    names = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    loud = [logging.getLogger(name).disabled for name in names]
    launch(max, [1, 2], LaunchSettings(workers=1))
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert [logging.getLogger(name).disabled for name in names] == loud


def test_a_hangup_interrupts_workers_unless_it_is_ignored_as_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_by(["SIGHUP"]):
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with interrupted_by(["SIGHUP", "SIGNONE"]), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
