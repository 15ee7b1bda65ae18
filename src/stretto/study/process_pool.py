"""Runs at the same time, each in a process of its own; if a process dies, only its run has failed."""

import contextlib
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.nn.devices import computing_with
from stretto.options.import_object import read_objects
from stretto.options.user_errors import exits_told
from stretto.processes import fork_server
from stretto.runtime.launch import LaunchSettings
from stretto.settings.runs import known
from stretto.study.disk_errors import FullDiskError
from stretto.study.prepare import costs_of, prepare_trial
from stretto.study.run_processes import REPORT_EVERY, run_on_processes
from stretto.study.study import Task
from stretto.study.training_run import counting, run


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


@dataclass
class _Runner:
    """A process of the pool, and the run it is making; `steps` are those it has reported."""

    process: BaseProcess
    pipe: Connection
    task: Task | None = None
    steps: int = 0


ALIKE = 3  # runs that fail alike before any other has finished: then the others are not tried
ENDING = 5.0  # seconds that a process without a run has to end by itself
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
        reason = _attempt(task, on_step, alone=True)
        on_step(known(task.settings.steps), None)
        if reason is None:
            on_run(task)
        else:
            failures.append(Failure(task, reason))


def traceback_of(task: Task) -> Path:
    """The file with the traceback of a run that failed."""
    return task.folder.with_name(f"{task.folder.name}.failed.txt")


def _attempt(task: Task, on_step: Callable[[int, float | None], None], *, alone: bool = False) -> str | None:
    traceback_file = traceback_of(task)
    try:
        with computing_with(task.settings.threads), exits_told():
            _make(task, on_step, alone=alone)
        traceback_file.unlink(missing_ok=True)
    except FullDiskError:
        raise
    except Exception as error:  # noqa: BLE001 - the study goes on; the reason is reported at its end
        with contextlib.suppress(OSError):
            traceback_file.parent.mkdir(parents=True, exist_ok=True)
            traceback_file.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error} (more in {traceback_file})"
    return None


def _make(task: Task, on_step: Callable[[int, float | None], None], *, alone: bool) -> None:
    read_objects(task.objects)
    if task.settings.workers is None:
        run(task.settings, task.folder, on_step, operations=task.operations, alone=alone)
    else:
        costs = costs_of(prepare_trial(task.settings))
        place = LaunchSettings(workers=task.settings.workers, timeout=task.timeout)
        run_on_processes(
            task.settings, task.folder, on_step, place, costs, operations=task.operations, objects=task.objects
        )


def _run_in_processes(take: Take, jobs: int, on_steps: OnSteps, on_run: OnRun, failures: list[Failure]) -> None:
    runners = list[_Runner]()
    try:
        while busy := _fill(runners, take, jobs):
            wait([runner.pipe for runner in busy])
            for runner in busy:
                if runner.pipe.poll() and not _receive(runner, on_steps, on_run, failures):
                    runners.remove(runner)
    finally:
        end(runners)


def end(runners: list[_Runner]) -> None:
    """End processes: those without a run by themselves, as they clean up then (torch.export leaves semaphores)."""
    for runner in runners:
        runner.pipe.close()
        if runner.task is not None:
            runner.process.terminate()
    for runner in runners:
        runner.process.join(ENDING)
        runner.process.terminate()
        runner.process.join()


def _fill(runners: list[_Runner], take: Take, jobs: int) -> list[_Runner]:
    """Give runs to idle processes, and start processes up to `jobs`, while there are runs; return the busy ones."""
    while sum(runner.task is not None for runner in runners) < jobs and (task := take()) is not None:
        idle = next((runner for runner in runners if runner.task is None), None)
        if idle is None:
            idle = _Runner(*fork_server.start(_work))
            runners.append(idle)
        _send(idle, task)
    return [runner for runner in runners if runner.task is not None]


def _send(runner: _Runner, task: Task) -> None:
    runner.task, runner.steps = task, 0
    # A process that has just died is noticed when its pipe is read.
    with contextlib.suppress(BrokenPipeError):
        runner.pipe.send(task)


def _receive(runner: _Runner, on_steps: OnSteps, on_run: OnRun, failures: list[Failure]) -> bool:
    """Handle one message of a process; False if it has died instead."""
    assert runner.task is not None
    try:
        kind, value = runner.pipe.recv()
    except (EOFError, ConnectionResetError):
        runner.process.join()
        runner.pipe.close()
        on_steps(known(runner.task.settings.steps) - runner.steps)
        failures.append(Failure(runner.task, _cause_of_death(runner.process)))
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


def _cause_of_death(process: BaseProcess) -> str:
    code = process.exitcode or 0
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    remedy = "; the machine may be short of memory: try fewer --jobs" if code == -signal.SIGKILL else ""
    return f"the process of this run (id {process.pid}) {how}{remedy}"


def _work(pipe: Connection) -> None:
    """What a process of the pool does: make the runs it is sent until the pipe closes."""
    fork_server.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last = 0.0

    def on_step(step: int, _: float | None) -> None:
        nonlocal last
        if time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            pipe.send(("steps", step))

    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            task: Any = pipe.recv()
            try:
                pipe.send(("done", _attempt(task, on_step)))
            except FullDiskError as error:
                pipe.send(("full disk", str(error)))
