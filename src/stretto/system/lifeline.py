"""A process ends with the one that started it, however that one ends, and whatever the process itself does then.

The fork server checks four times a second whether its starter is still its parent, also while it imports. Its forks
hold one end of a pipe whose other end only the starter has open: when the pipe closes, the starter has ended. On Linux
the kernel also kills both at once, even where they are stopped (PR_SET_PDEATHSIG); but it takes the end of the thread
that started a process for the end of the parent, so the server asks for that only if a main thread has started it.
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

STARTER = "STRETTO_STARTER"  # environment variable of the fork server: "<id of the starter> <main or other thread>"
PERIOD = 0.25  # seconds between two checks of the parent, by the fork server and by its forks
ENDING = 5.0  # seconds that a command takes at most to end
PR_SET_PDEATHSIG = 1  # in <linux/prctl.h>

_server: list[int] = []  # the id of the fork server, in it and in what it forks


@contextlib.contextmanager
def starter_named() -> Iterator[None]:
    """Name this process and thread to a fork server that is started meanwhile: it ends with them."""
    thread = "main" if threading.current_thread() is threading.main_thread() else "other"
    os.environ[STARTER] = f"{os.getpid()} {thread}"
    try:
        yield
    finally:
        del os.environ[STARTER]


def serve() -> None:
    """Make a fork server, before it imports, end with its starter. Does nothing in any other process."""
    starter, _, thread = os.environ.pop(STARTER, "").partition(" ")
    if not starter:
        return
    _server[:] = [os.getpid()]
    parent = int(starter)

    def check_parent(_: int, __: FrameType | None) -> None:
        if os.getpid() == _server[0] and os.getppid() != parent:
            os._exit(0)

    atexit.register(exit_at_once)
    os.register_at_fork(after_in_child=after_fork)
    sys.excepthook = report_unless_ended
    signal.signal(signal.SIGALRM, check_parent)
    signal.siginterrupt(signal.SIGALRM, False)
    if thread == "main":
        end_with_parent()
    signal.setitimer(signal.ITIMER_REAL, 1e-6, PERIOD)  # forks have no timer


def exit_at_once() -> None:
    """End the fork server without freeing what it has imported, which would take seconds."""
    if os.getpid() == _server[0]:
        os._exit(0)


def after_fork() -> None:
    """Make a fork of the server end with it, first of all; nothing in forks of forks."""
    if os.getppid() == _server[0]:
        end_with_parent()


def report_unless_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the server, or of a fork that has not begun yet, unless what causes it is no error.

    A starter that is interrupted as it asks for a fork ends the server by an EOFError; if it goes on, it makes another.
    Forks fail where their starter is about to end.
    """
    if os.getpid() == _server[0] and issubclass(kind, EOFError):
        return
    until = time.monotonic() + ENDING
    while os.getpid() != _server[0] and time.monotonic() < until:
        if os.getppid() != _server[0]:
            return
        time.sleep(0.05)
    sys.__excepthook__(kind, error, trace)


def follow() -> None:
    """Make this process, which multiprocessing has started, end with its starter and with its fork server."""
    starter = multiprocessing.parent_process()
    assert starter is not None, "multiprocessing has started this process"
    parent = os.getppid()
    if _server:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        sys.excepthook = sys.__excepthook__
        end_with_parent()
        if os.getppid() != _server[0]:
            os._exit(1)

    def watch() -> None:
        while not wait([starter.sentinel], PERIOD) and os.getppid() == parent:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="stretto-lifeline", daemon=True).start()


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that started it ends (on Linux; else nothing)."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
