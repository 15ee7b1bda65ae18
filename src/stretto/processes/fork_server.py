"""Processes forked from one that has imported what they need, which takes a fresh one seconds.

That one is Python's own fork server. It has a single thread, has computed nothing, is deaf to Ctrl-C and SIGTERM, which
may come to all processes of a job, and ends with whoever started it, as do its forks (stretto.processes.lifeline).
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

from stretto.files import temporary_folders
from stretto.processes import lifeline

ROOM = 72  # characters for the folder of temporary files: the server's socket is in there, and its path has 107 at most
# torch.optim imports torch._dynamo at its first step; each process imports the command anew that it was started by.
NEEDED = (
    "stretto.processes.server_start",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.api",
    "stretto.cli.program",
    "stretto.trainer.distributed",
    "stretto.study.calibration_processes",
    "stretto.study.process_pool",
    "stretto.study.launch",
)
LOST = (EOFError, ConnectionError)  # what comes of asking for a process when the fork server has gone meanwhile
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def method() -> str:
    """How processes start: forked, where that is possible. Windows has no forks."""
    possible = "forkserver" in multiprocessing.get_all_start_methods() and len(tempfile.gettempdir()) <= ROOM
    return "forkserver" if possible else "spawn"


def prepare() -> None:
    """See that this process has begun to import; what this one does meanwhile costs no time."""
    if method() == "forkserver":
        temporary_folders.sweep()
        temporary_folders.for_sockets()
        with deaf_to(signal.SIGINT, signal.SIGTERM), one_thread(), lifeline.told():
            multiprocessing.set_forkserver_preload([*NEEDED])
            forkserver.ensure_running()


def begin() -> None:
    """What a process does first: it ends with its parent, and by SIGTERM. Ctrl-C it never hears: its parent does."""
    lifeline.follow()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def deaf_to(*signals: signal.Signals) -> Iterator[None]:
    """Processes started in here never hear these signals, not even while they import."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its own start would end the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """What is imported by a process started in here starts no threads: a fork would miss them."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
