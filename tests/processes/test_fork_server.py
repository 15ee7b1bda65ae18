"""Forked processes: what they hear, how many threads they have, and when they cannot be forks."""

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from stretto.system import fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fork(target, *args):
    fork_server.prepare()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def look(pipe):
    pipe.send((len(list(Path("/proc/self/task").iterdir())), [name in sys.modules for name in fork_server.NEEDED]))


def test_a_fork_has_one_thread_and_all_that_it_needs():
    mine, theirs = multiprocessing.Pipe()
    assert fork(look, theirs) == 0
    assert mine.recv() == (1, [True] * len(fork_server.NEEDED))


def send(number):
    fork_server.begin()
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_never_hears_ctrl_c_but_can_be_told_to_end(number, status):
    assert fork(send, number) == status


def test_where_a_socket_would_find_no_room_processes_are_no_forks(monkeypatch):
    assert fork_server.method() == "forkserver"
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * fork_server.LONGEST_FOLDER)
    assert fork_server.method() == "spawn"
