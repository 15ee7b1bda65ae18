"""Processes forked from Python's fork server, which has imported what they need: a fresh process takes seconds for it.

The server has one thread and has computed nothing. It blocks Ctrl-C and SIGTERM, which may be sent to all processes of
a job. It ends with the process that started it, and so do its forks (stretto.system.lifeline).
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from stretto import interrupts
from stretto.errors import StrettoError
from stretto.system import lifeline, temporary_folders

LONGEST_FOLDER = 72  # characters of the folder for temporary files: the path of a socket in it has 107 at most
# torch.optim imports torch._dynamo at its first step; each process imports the module again that the command ran as.
NEEDED = (
    "stretto.system.fork_server_preload",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.api",
    "stretto.cli.program",
    "stretto.trainer.distributed",
    "stretto.study.calibration_processes",
    "stretto.study.run_processes",
)
LOST = (EOFError, ConnectionError)  # raised where a process is started and the fork server has ended meanwhile
# what a fork server imports may start no threads: a fork does not copy them
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# once a command has been killed, what its workers and Python say on their way out: a trace of torch's store, semaphores
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}


def method() -> str:
    """The start method for multiprocessing: forkserver where it is possible, else spawn (on Windows)."""
    possible = "forkserver" in multiprocessing.get_all_start_methods() and len(tempfile.gettempdir()) <= LONGEST_FOLDER
    return "forkserver" if possible else "spawn"


def prepare() -> None:
    """Start the fork server, unless it runs. It imports while this process goes on."""
    with interrupts.held():
        if method() == "forkserver":
            temporary_folders.sweep()
            temporary_folders.for_sockets()
            quiet = {name: value for name, value in QUIET.items() if name not in os.environ}
            with environment(ONE_THREAD | quiet), blocked(signal.SIGINT, signal.SIGTERM), lifeline.starter_named():
                multiprocessing.set_forkserver_preload([*NEEDED])
                forkserver.ensure_running()


def begin() -> None:
    """What a started process calls first: it ends with its parent, and by SIGTERM. Ctrl-C is left to its parent."""
    lifeline.follow()
    without_semaphores()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def start(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a daemon that calls `work(pipe, *arguments)`; return it and the other end of its pipe.

    Tried three times, because the fork server may end meanwhile. Raises StrettoError if none of them succeeds.
    """
    for pause in (0.1, 1.0, None):  # seconds: a server that is about to end is still there
        prepare()
        context = multiprocessing.get_context(method())
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=work, args=(theirs, *arguments), daemon=True)  # type: ignore[attr-defined]
        try:
            with blocked(signal.SIGINT), without_script():
                process.start()
            break
        except LOST as error:
            ours.close()
            if pause is None:
                raise StrettoError("no process can be started: the fork server has ended three times") from error
            time.sleep(pause)
        finally:
            theirs.close()
    return process, ours


def without_semaphores() -> None:
    """Let tqdm, which torch.fx calls, make a lock of threads in this process.

    Its own lock is a semaphore besides. If this process were killed, multiprocessing would warn of a leaked one.
    """
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals in processes that are started meanwhile, from their first instruction on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # started later, it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """Keep processes that are started meanwhile from running the user's script again.

    multiprocessing runs the file of `__main__` in each process, for what it defines. A script without
    `if __name__ == "__main__"` would start its study there once more. Stretto's own commands define nothing.
    """
    main = sys.modules["__main__"]
    before = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    for name in before:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(main, name, value)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Give processes that are started meanwhile these environment variables; those of this process are restored."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
