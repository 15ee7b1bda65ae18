"""Processes that are started for a task: messages with them, their ends, and why one has died.

A `Child` has a pipe to its starter. The workers of a launcher, which torch starts, send through one pipe (`hearing`).
"""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from stretto.system import fork_server

ENDING = 5.0  # seconds that a process has to end by itself, and then by SIGTERM


class Child:
    """A process that calls `work(pipe, *arguments)`; `pipe` is this end of theirs. Raises StrettoError as `start`."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.process, self.pipe = fork_server.start(serve, work, *arguments)

    def send(self, message: Any) -> None:
        """Send it a message. One that has just died is noticed when it is heard."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """Its next message. Raises EOFError if it has died; its exit code is known then."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(ENDING)
            raise EOFError from None


def serve(pipe: Connection, work: Callable[..., None], *arguments: Any) -> None:
    """What a child does: its work, until its starter has ended or closes the pipe."""
    fork_server.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError):
        work(pipe, *arguments)


def end(children: Sequence[Child], *, at_once: bool = False) -> None:
    """End processes: by themselves once their pipes are closed, as they clean up then, or by SIGTERM `at_once`."""
    for child in children:
        child.pipe.close()
        if at_once:
            child.process.terminate()
    for child in children:
        for stop in (child.process.terminate, child.process.kill):
            child.process.join(ENDING)
            stop()
        child.process.join()


@contextlib.contextmanager
def hearing(hear: Callable[[Any], object]) -> Iterator[Connection]:
    """Yield the end of a pipe for processes that are started meanwhile; what they send is passed to `hear`."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def listen() -> None:
        while (message := ours.recv()) is not None:
            hear(message)

    listener = threading.Thread(target=listen, name="stretto-messages", daemon=True)
    listener.start()
    try:
        yield theirs
    finally:
        theirs.send(None)
        listener.join(ENDING)  # what a worker was killed in may be half a message
        theirs.close()
        ours.close()


def exit_reason(who: str, code: int | None, *, signal_is: str = "", remedy: str = "") -> str:
    """Why a process died that has said nothing."""
    if code is None or code >= 0:
        return f"{who} ended with exit code {code or 0}"
    memory = f"; the machine may be short of memory{remedy}" if code == -signal.SIGKILL else ""
    return f"{who} was ended by {signal_is}{signal.Signals(-code).name}{memory}"
