"""One run on several processes: start them, receive their progress, and remove their files if they fail.

`work` is what each of the processes does.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.errors import UsageError
from stretto.files.temporary_folders import scratch
from stretto.measure import Costs
from stretto.options.import_object import read_objects
from stretto.runtime.launch import LaunchSettings, WorkerFailedError, launch
from stretto.runtime.world import take_place
from stretto.settings.runs import TrainSettings
from stretto.study.disk_errors import FullDiskError
from stretto.study.store import discard, refuse_busy
from stretto.study.training_loop import OnStep
from stretto.study.training_run import run

REPORT_EVERY = 0.1  # seconds from one report of a process on its progress to the next, at least
RAISED_AGAIN = {kind.__name__: kind for kind in (FullDiskError, UsageError)}  # as they were raised in a process


@dataclass(frozen=True)
class Job:
    """The argument of `work`. `progress` is a pipe into which the first process writes the steps it has made."""

    settings: TrainSettings
    folder: Path
    costs: Costs
    trace: bool
    operations: bool
    resume: bool
    progress: Path
    timeout: float
    keeps: bool
    objects: Path | None


def run_on_processes(
    settings: TrainSettings,
    folder: Path,
    on_step: OnStep,
    place: LaunchSettings,
    costs: Costs,
    *,
    trace: bool = False,
    operations: bool = False,
    resume: bool = False,
    keeps: bool = False,
    objects: Path | None = None,
) -> None:
    """Make a (resolved) run on the processes of `place`, with the same numbers, files and options as `run`.

    Raises WorkerFailedError if a process fails; only checkpoints are left then. Processes that are started again resume
    from the newest checkpoint.
    """
    refuse_busy(folder)
    with scratch() as temporary:
        job = Job(settings, folder.absolute(), costs, trace, operations, resume, temporary / "progress",
                  place.timeout, keeps, objects)  # fmt: skip
        try:
            start(work, [job], place, job.progress, on_step)
        except BaseException:
            discard(folder)
            raise


def start(
    function: Callable[..., None], arguments: Sequence[Any], place: LaunchSettings, pipe: Path, on_step: OnStep
) -> None:
    """Call `function` in each process of `place`; `pipe` is made, and steps written into it are passed to `on_step`.

    Raises WorkerFailedError if a process fails, or FullDiskError or UsageError if that is what it raised.
    """
    try:
        with progress_pipe(pipe, on_step):
            launch(function, arguments, place)
    except WorkerFailedError as error:
        if error.kind in RAISED_AGAIN:
            raise RAISED_AGAIN[error.kind](f"{error}") from None
        raise


@contextlib.contextmanager
def progress_pipe(pipe: Path, on_step: OnStep) -> Iterator[None]:
    """Make a named pipe and pass its lines to `on_step`: a step, and its loss if it is known."""
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
    """Pass lines from a pipe to `on_step` until `done` is set and the pipe is empty."""
    rest = b""
    while True:
        if select.select([end], [], [], 0 if done.is_set() else 0.1)[0]:
            *lines, rest = (rest + os.read(end, 1 << 16)).split(b"\n")
            for line in lines:
                step, *loss = line.split()
                on_step(int(step), float(loss[0]) if loss else None)
        elif done.is_set():
            return


def work(job: Job) -> None:
    """Make this process's part of a run."""
    read_objects(job.objects)
    take_place(job.settings.placement)
    torch.set_num_threads(job.settings.threads)  # as in emulation, so that the numbers are the same
    with job.progress.open("w", encoding="ascii") as pipe:
        first, last = os.environ.get("RANK") == "0", 0.0

        def on_step(step: int, loss: float | None) -> None:
            nonlocal last
            if first and (time.monotonic() - last > REPORT_EVERY or step == job.settings.steps):
                last = time.monotonic()
                print(step, "" if loss is None else loss, file=pipe, flush=True)

        resume = job.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        run(
            job.settings, job.folder, on_step, trace=job.trace, operations=job.operations, costs=job.costs,
            resume=resume, timeout=job.timeout, keeps=job.keeps,
        )  # fmt: skip
