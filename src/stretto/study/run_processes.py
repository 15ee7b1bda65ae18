"""A run on several processes: the command that was given starts them, hears how far they are, and clears up."""

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.temporary_folders import scratch
from stretto.measure import Costs
from stretto.runtime.launch import Place, WorkerFailedError, launch
from stretto.settings.runs import TrainSettings
from stretto.study.disk_errors import FullDiskError
from stretto.study.launched import Job, work
from stretto.study.store import discard, refuse_busy
from stretto.study.training_run import OnStep

ERRORS = {each.__name__: each for each in (FullDiskError, UsageError)}  # those that mean something to callers


def run_on_processes(
    settings: TrainSettings,
    folder: Path,
    on_step: OnStep,
    place: Place,
    costs: Costs,
    *,
    trace: bool = False,
    resume: bool = False,
    keeps: bool = False,
) -> None:
    """Make a (resolved) run on the processes of `place`: the same numbers and files as `run` leaves, by its options.

    Raises WorkerFailedError if a process fails; nothing but checkpoints is left then. Processes that are started again
    go on from the newest one.
    """
    refuse_busy(folder)
    with scratch() as mine:
        job = Job(settings, folder.absolute(), costs, trace, resume, mine / "progress", place.timeout, keeps)
        try:
            start(work, [job], place, job.progress, on_step)
        except BaseException:
            discard(folder)
            raise


def start(work: Callable[..., None], arguments: Sequence[Any], place: Place, pipe: Path, on_step: OnStep) -> None:
    """Call `work` in each process of `place`, hearing through a pipe that it makes how far they are.

    Raises WorkerFailedError if one fails; of those errors that mean something to callers, the error itself.
    """
    try:
        with heard(pipe, on_step):
            launch(work, arguments, place)
    except WorkerFailedError as error:
        if error.kind in ERRORS:
            raise ERRORS[error.kind](f"{error}") from None
        raise


@contextlib.contextmanager
def heard(pipe: Path, on_step: OnStep) -> Iterator[None]:
    """Make the pipe, and pass on what is written into it: lines of a step and, if it is known, a loss."""
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # also for writing: it does not end with a writer
    done = threading.Event()
    listener = threading.Thread(target=listen, args=(end, on_step, done), name="stretto-progress", daemon=True)
    listener.start()
    try:
        yield
    finally:
        done.set()
        listener.join()
        os.close(end)


def listen(end: int, on_step: OnStep, done: threading.Event) -> None:
    """Pass on what comes, until it is `done` and nothing is left."""
    rest = b""
    while True:
        if select.select([end], [], [], 0 if done.is_set() else 0.1)[0]:
            *lines, rest = (rest + os.read(end, 1 << 16)).split(b"\n")
            for line in lines:
                step, *loss = line.split()
                on_step(int(step), float(loss[0]) if loss else None)
        elif done.is_set():
            return
