"""Runs in processes: one on several, and several at the same time, each in a process of its own.

The processes of one run, which do `work`, tell their progress through a pipe; if they fail, its files are removed. Of
several runs only that of a process that dies has failed.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from stretto.errors import UsageError
from stretto.nn.devices import computing_with
from stretto.options.import_object import read_objects
from stretto.options.user_errors import exits_told
from stretto.runtime.launch import LaunchSettings, WorkerFailedError, launch
from stretto.runtime.world import take_place
from stretto.settings.runs import known
from stretto.study.prepare import costs_of, prepare_trial
from stretto.study.store import FullDiskError, discard, refuse_busy
from stretto.study.training_run import OnStep, Task, counting, make_run
from stretto.system.children import Child, end, exit_reason, hearing

REPORT_EVERY = 0.1  # seconds from one report of a process on its progress to the next, at least
RAISED_AGAIN = {kind.__name__: kind for kind in (FullDiskError, UsageError)}  # as they were raised in a process


def run_on_processes(task: Task, place: LaunchSettings, on_step: OnStep) -> None:
    """Make a run on the processes of `place`, with the same numbers and files as `make_run` in this one.

    Raises WorkerFailedError if a process fails; only checkpoints are left then. Processes that are started again resume
    from the newest checkpoint.
    """
    refuse_busy(task.folder)
    own = replace(task, folder=task.folder.absolute(), timeout=place.timeout)
    try:
        start(work, [own], place, lambda told: on_step(*told))
    except BaseException:
        discard(task.folder)
        raise


def start(
    function: Callable[..., None], arguments: Sequence[Any], place: LaunchSettings, hear: Callable[[Any], object]
) -> None:
    """Call `function` in each process of `place`, with a pipe as its last argument; what is sent goes to `hear`.

    Raises WorkerFailedError if a process fails, or FullDiskError or UsageError if that is what it raised.
    """
    try:
        with hearing(hear) as pipe:
            launch(function, [*arguments, pipe], place)
    except WorkerFailedError as error:
        if error.kind in RAISED_AGAIN:
            raise RAISED_AGAIN[error.kind](f"{error}") from None
        raise


def work(task: Task, pipe: Connection) -> None:
    """Make this process's part of a run; the first one sends the steps it has made, with their losses if known."""
    read_objects(task.objects)
    take_place(task.settings.placement)
    torch.set_num_threads(task.settings.threads)  # as in emulation, so that the numbers are the same
    first, last = os.environ.get("RANK") == "0", 0.0

    def on_step(step: int, loss: float | None) -> None:
        nonlocal last
        if first and (time.monotonic() - last > REPORT_EVERY or step == task.settings.steps):
            last = time.monotonic()
            pipe.send((step, loss))

    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    make_run(replace(task, resume=task.resume or restarted), on_step)


@dataclass(frozen=True)
class Failure:
    """A run that could not be made, and the reason."""

    task: Task
    reason: str

    @property
    def is_users(self) -> bool:
        """Whether the reason is a mistake of the user's, as in their functions or data."""
        return self.reason.startswith(f"{UsageError.__name__}: ")

    @property
    def cause(self) -> str:
        """The reason without the file that has more of it, which is another one for each run."""
        return self.reason.removesuffix(f" (more in {traceback_of(self.task)})")


class _Runner(Child):
    """A process of the pool, and the run it is making; `steps` are those it has reported."""

    task: Task | None = None
    steps = 0


ALIKE = 3  # runs that fail alike before any other has finished: then the others are not tried
Take = Callable[[], Task | None]  # returns the next run to be made; None if there is none now
OnSteps = Callable[[int], None]  # called with the number of steps made since the last call
OnRun = Callable[[Task], None]  # called when a run has ended and is on the disk


def run_all(take: Take, jobs: int, on_steps: OnSteps, on_run: OnRun, *, gives_up: bool = False) -> list[Failure]:
    """Make runs until `take` returns None, `jobs` at a time; return those that failed.

    The number of jobs changes the order in which runs end, not their numbers. With one job all runs are made in this
    process. With `gives_up` no run is taken while the first ones, at least ALIKE, have all failed for the same cause.
    Raises FullDiskError as soon as a result cannot be written, and KeyboardInterrupt, if there was one, once every
    process that was started has ended.
    """
    failures, finished = list[Failure](), list[Task]()

    def take_next() -> Task | None:
        hopeless = len(failures) >= ALIKE and not finished and len({failure.cause for failure in failures}) == 1
        return None if gives_up and hopeless else take()

    def on_finished(task: Task) -> None:
        finished.append(task)
        on_run(task)

    if jobs == 1:
        _run_here(take_next, on_steps, on_finished, failures)
    else:
        _run_in_processes(take_next, jobs, on_steps, on_finished, failures)
    return failures


def _run_here(take: Take, on_steps: OnSteps, on_run: OnRun, failures: list[Failure]) -> None:
    while (task := take()) is not None:
        on_step = counting(on_steps)
        reason = _attempt(task, on_step)
        on_step(known(task.settings.steps), None)
        if reason is None:
            on_run(task)
        else:
            failures.append(Failure(task, reason))


def traceback_of(task: Task) -> Path:
    """The file with the traceback of a run that failed."""
    return task.folder.with_name(f"{task.folder.name}.failed.txt")


def _attempt(task: Task, on_step: OnStep) -> str | None:
    traceback_file = traceback_of(task)
    try:
        with computing_with(task.settings.threads), exits_told():
            _make(task, on_step)
        traceback_file.unlink(missing_ok=True)
    except FullDiskError:
        raise
    except Exception as error:  # noqa: BLE001 - the study goes on; the reason is reported at its end
        with contextlib.suppress(OSError):
            traceback_file.parent.mkdir(parents=True, exist_ok=True)
            traceback_file.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error} (more in {traceback_file})"
    return None


def _make(task: Task, on_step: OnStep) -> None:
    read_objects(task.objects)
    if task.settings.workers is None:
        make_run(task, on_step)
    else:
        place = LaunchSettings(workers=task.settings.workers, timeout=task.timeout)
        run_on_processes(replace(task, costs=costs_of(prepare_trial(task.settings))), place, on_step)


def _run_in_processes(take: Take, jobs: int, on_steps: OnSteps, on_run: OnRun, failures: list[Failure]) -> None:
    runners = list[_Runner]()
    try:
        while busy := _fill(runners, take, jobs):
            wait([runner.pipe for runner in busy])
            for runner in busy:
                if runner.pipe.poll() and not _receive(runner, on_steps, on_run, failures):
                    runners.remove(runner)
    finally:
        for runner in runners:
            if runner.task is not None:
                runner.process.terminate()
        end(runners)  # those without a run clean up (torch.export leaves semaphores)


def _fill(runners: list[_Runner], take: Take, jobs: int) -> list[_Runner]:
    """Give runs to idle processes, and start processes up to `jobs`, while there are runs; return the busy ones."""
    while sum(runner.task is not None for runner in runners) < jobs and (task := take()) is not None:
        idle = next((runner for runner in runners if runner.task is None), None)
        if idle is None:
            idle = _Runner(_work)
            runners.append(idle)
        idle.task, idle.steps = task, 0
        idle.send(task)
    return [runner for runner in runners if runner.task is not None]


def _receive(runner: _Runner, on_steps: OnSteps, on_run: OnRun, failures: list[Failure]) -> bool:
    """Handle one message of a process; False if it has died instead."""
    assert runner.task is not None
    try:
        kind, value = runner.receive()
    except EOFError:
        runner.pipe.close()
        on_steps(known(runner.task.settings.steps) - runner.steps)
        who = f"the process of this run (id {runner.process.pid})"
        reason = exit_reason(who, runner.process.exitcode, signal_is="signal ", remedy=": try fewer --jobs")
        failures.append(Failure(runner.task, reason))
        return False
    if kind == "steps":
        on_steps(value - runner.steps)
        runner.steps = value
    elif kind == "full disk":
        raise FullDiskError(value)
    else:
        on_steps(known(runner.task.settings.steps) - runner.steps)
        if value is None:
            on_run(runner.task)
        else:
            failures.append(Failure(runner.task, value))
        runner.task = None
    return True


def _work(pipe: Connection) -> None:
    """What a process of the pool does: make the runs it is sent until the pipe closes."""
    last = 0.0

    def on_step(step: int, _: float | None) -> None:
        nonlocal last
        if time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            pipe.send(("steps", step))

    while True:
        task: Any = pipe.recv()
        try:
            pipe.send(("done", _attempt(replace(task, alone=False), on_step)))
        except FullDiskError as error:
            pipe.send(("full disk", str(error)))
