"""A process ends with the one that started it, however that one ends, and whatever it does itself at the time.

The fork server looks four times a second whether its starter is still its parent, also while it imports. What it forks
holds the end of a pipe that only the starter has open: when the pipe closes, the starter has gone. Linux ends both at
once besides, even where they are stopped; but it takes the end of a parent's thread for that of the parent, so a server
asks for it only if a main thread has started it.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from types import FrameType, TracebackType

STARTER = "STRETTO_STARTER"  # what the fork server is told in its environment: "<process id> <main or other thread>"
PERIOD = 0.25  # seconds between two looks of the fork server at its parent, and of what it forked at theirs
ENDING = 5.0  # seconds that a command may take to end
PR_SET_PDEATHSIG = 1  # in <linux/prctl.h>

_server: list[int] = []  # the id of the fork server, in it and in what it forks


@contextlib.contextmanager
def told() -> Iterator[None]:
    """A fork server started in here is told whom to end with."""
    thread = "main" if threading.current_thread() is threading.main_thread() else "other"
    os.environ[STARTER] = f"{os.getpid()} {thread}"
    try:
        yield
    finally:
        del os.environ[STARTER]


def serve() -> None:
    """Make this process, a fork server that begins to import, end with its starter. Elsewhere nothing."""
    starter, _, thread = os.environ.pop(STARTER, "").partition(" ")
    if not starter:
        return
    _server[:] = [os.getpid()]
    parent = int(starter)

    def look(_: int, __: FrameType | None) -> None:
        if os.getpid() == _server[0] and os.getppid() != parent:
            os._exit(0)

    atexit.register(leave)
    os.register_at_fork(after_in_child=born)
    sys.excepthook = complain
    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    if thread == "main":
        end_at_once()
    signal.setitimer(signal.ITIMER_REAL, 1e-6, PERIOD)  # forks have no timer


def leave() -> None:
    """End the fork server without taking all that it has imported apart, which takes it seconds."""
    if os.getpid() == _server[0]:
        os._exit(0)


def born() -> None:
    """What a fork of the server does first of all; forks of forks do nothing."""
    if os.getppid() == _server[0]:
        end_at_once()


def complain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell of an error in a fork that has not begun yet, unless it comes of its starter's end, which is under way."""
    until = time.monotonic() + ENDING
    while os.getpid() != _server[0] and time.monotonic() < until:
        if os.getppid() != _server[0]:
            return
        time.sleep(0.05)
    sys.__excepthook__(kind, error, trace)


def follow() -> None:
    """Make this process, which multiprocessing has started, end with whoever asked for it and with its fork server."""
    starter = multiprocessing.parent_process()
    assert starter is not None, "only what multiprocessing has started follows somebody"
    parent = os.getppid()
    if _server:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        sys.excepthook = sys.__excepthook__
        end_at_once()
        if os.getppid() != _server[0]:
            os._exit(1)

    def watch() -> None:
        while not wait([starter.sentinel], PERIOD) and os.getppid() == parent:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="stretto-lifeline", daemon=True).start()


def end_at_once() -> None:
    """Have the system kill this process as soon as the thread that started it ends, where it can (Linux)."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
