"""Runs side by side in processes of one thread each; a process that dies costs one run, not the study."""

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.processes import fork_server
from stretto.settings.runs import TrainSettings, known
from stretto.study.disk_errors import FullDiskError

PATIENT = 600.0  # seconds that workers wait for each other unless said otherwise
REPORT_EVERY = 0.1  # seconds between two words of a process about its progress


@dataclass(frozen=True)
class Task:
    """One run to be made, and where."""

    settings: TrainSettings
    folder: Path
    timeout: float = PATIENT


@dataclass(frozen=True)
class Failure:
    """A run that could not be made, and why."""

    task: Task
    reason: str


@dataclass
class _Slot:
    process: BaseProcess
    pipe: Connection
    task: Task | None = None
    steps: int = 0


Take = Callable[[], Task | None]  # the next run to be made; None if there is none now
OnSteps = Callable[[int], None]  # more steps done
OnRun = Callable[[Task], None]  # a run has ended and is on the disk


def run_all(take: Take, jobs: int, on_steps: OnSteps, on_run: OnRun) -> list[Failure]:
    """Make every run that can be taken, `jobs` at a time; return those that failed.

    The order of results is free, their numbers are not. With one job everything happens in this process. Raises
    FullDiskError as soon as a result cannot be written, and passes KeyboardInterrupt on once every process it started
    has ended.
    """
    return _run_here(take, on_steps, on_run) if jobs == 1 else _run_in_processes(take, jobs, on_steps, on_run)


def _run_here(take: Take, on_steps: OnSteps, on_run: OnRun) -> list[Failure]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    failures = []
    try:
        while (task := take()) is not None:
            done = 0

            def on_step(step: int, _: float | None) -> None:
                nonlocal done
                on_steps(step - done)
                done = step

            reason = _attempt(task, on_step)
            on_steps(known(task.settings.steps) - done)
            if reason is None:
                on_run(task)
            else:
                failures.append(Failure(task, reason))
    finally:
        torch.set_num_threads(threads)
    return failures


def _attempt(task: Task, on_step: Callable[[int, float | None], None]) -> str | None:
    story = task.folder.with_name(f"{task.folder.name}.failed.txt")
    try:
        _make(task, on_step)
        story.unlink(missing_ok=True)
    except FullDiskError:
        raise
    except Exception as error:  # noqa: BLE001 - the study goes on; the reason is reported at its end
        with contextlib.suppress(OSError):
            story.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error} (more in {story})"
    return None


def _make(task: Task, on_step: Callable[[int, float | None], None]) -> None:
    from stretto.runtime.launch import Place
    from stretto.study.prepare import costs_of, prepare
    from stretto.study.run_processes import run_on_processes
    from stretto.study.training_run import run

    workers = task.settings.workers
    if workers is None:
        run(task.settings, task.folder, on_step)
    else:
        costs = costs_of(prepare(task.settings))
        run_on_processes(task.settings, task.folder, on_step, Place(workers=workers, timeout=task.timeout), costs)


def _run_in_processes(take: Take, jobs: int, on_steps: OnSteps, on_run: OnRun) -> list[Failure]:
    failures, slots = list[Failure](), list[_Slot]()
    try:
        while busy := _fill(slots, take, jobs):
            wait([slot.pipe for slot in busy])
            for slot in busy:
                if slot.pipe.poll() and not _listen(slot, on_steps, on_run, failures):
                    slots.remove(slot)
    finally:
        for slot in slots:
            slot.pipe.close()
            slot.process.terminate()
            slot.process.join()
    return failures


def _fill(slots: list[_Slot], take: Take, jobs: int) -> list[_Slot]:
    """Give every process something to do, as long as there is something; return those that are at work."""
    while sum(slot.task is not None for slot in slots) < jobs and (task := take()) is not None:
        idle = next((slot for slot in slots if slot.task is None), None)
        if idle is None:
            idle = _start()
            slots.append(idle)
        _give(idle, task)
    return [slot for slot in slots if slot.task is not None]


def _start() -> _Slot:
    """A process that waits for something to do. One fork server may be lost meanwhile, not several."""
    for last in (False, False, True):
        fork_server.prepare()
        context = multiprocessing.get_context(fork_server.method())
        mine, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=_work, args=(theirs,), daemon=True)  # type: ignore[attr-defined]
        try:
            with fork_server.deaf_to(signal.SIGINT):
                process.start()
            break
        except fork_server.LOST as error:
            mine.close()
            if last:
                raise StrettoError("no process can be started: the fork server has ended three times") from error
        finally:
            theirs.close()
    return _Slot(process, mine)


def _give(slot: _Slot, task: Task) -> None:
    slot.task, slot.steps = task, 0
    # A process that has just died is noticed when its pipe is read.
    with contextlib.suppress(BrokenPipeError):
        slot.pipe.send(task)


def _listen(slot: _Slot, on_steps: OnSteps, on_run: OnRun, failures: list[Failure]) -> bool:
    """Hear one message; False if the process has died instead."""
    assert slot.task is not None
    try:
        kind, value = slot.pipe.recv()
    except (EOFError, ConnectionResetError):
        slot.process.join()
        slot.pipe.close()
        on_steps(known(slot.task.settings.steps) - slot.steps)
        failures.append(Failure(slot.task, _how_it_died(slot.process)))
        return False
    if kind == "steps":
        on_steps(value - slot.steps)
        slot.steps = value
    elif kind == "full disk":
        raise FullDiskError(value)
    else:
        on_steps(known(slot.task.settings.steps) - slot.steps)
        if value is None:
            on_run(slot.task)
        else:
            failures.append(Failure(slot.task, value))
        slot.task = None
    return True


def _how_it_died(process: BaseProcess) -> str:
    code = process.exitcode or 0
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    remedy = "; the machine may be short of memory: try fewer --jobs" if code == -signal.SIGKILL else ""
    return f"the process of this run (id {process.pid}) {how}{remedy}"


def _work(pipe: Connection) -> None:
    """A process' life: runs until the pipe closes."""
    fork_server.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
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
