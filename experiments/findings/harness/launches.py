"""Timed launches: processes started for one configuration at a time, on a quiet machine; resumable, in turns."""

import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness.cells import Record
from harness.machine import QUIET, load, machine, versions
from harness.store import Store

HERE = Path(__file__).parent.parent
SHARED = HERE.parent.parent / "benchmarks" / "shared"
sys.path.insert(0, str(SHARED))

from teams import Team, Wire, laid  # noqa: E402

from stretto.measure.busy_cores import busy_seconds  # noqa: E402
from stretto.runtime.process_memory import keep_memory  # noqa: E402

LAUNCHES = 3  # of each configuration
LOOK = 1.0  # seconds for which the machine is watched before a launch
PATIENCE = 600.0  # seconds that a launch waits for a quiet machine
Measure = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Launch:
    """One configuration that is measured in processes of its own.

    task: "module:function"; the function is called in every process with `settings`, builds what is to be measured and
    returns a function that measures it: figures by name, of which the largest of all processes counts. link: Mbit/s of
    the links between hosts of one process each; None for this host's loopback. sent: the most bytes that a process
    sends a step, from which a link that could not be made is predicted. `pinned` keeps each process on one core.
    """

    name: str
    task: str
    processes: int = 1
    link: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sent: float = 0.0
    pinned: bool = True
    number: int = 0

    @property
    def key(self) -> str:
        """The launch's name in the store."""
        return f"{self.place} | launch {self.number}"

    @property
    def place(self) -> str:
        """What is launched, and where; the same for all its launches."""
        where = "loopback" if self.link is None else f"{self.link} Mbit/s"
        return f"{self.name} | {self.processes} processes | {where}"

    @property
    def wire(self) -> Wire | None:
        """The link, where there is one."""
        return None if self.link is None else Wire(f"{self.link}", self.link, self.processes)


def interleaved(configurations: Sequence[Launch]) -> tuple[Launch, ...]:
    """The launches of all configurations in turns, each turn beginning with another configuration."""
    turns = []
    for number in range(LAUNCHES):
        first = number * len(configurations) // LAUNCHES
        turns += [replace(each, number=number) for each in (*configurations[first:], *configurations[:first])]
    return tuple(turns)


def launches_left(launches: Sequence[Launch], store: Mapping[str, Record], *, noisy: bool = False) -> list[Launch]:
    """The launches without a figure from a quiet machine, in their order; with `noisy` those without any figure."""
    found = [(each, store.get(each.key)) for each in launches]
    return [each for each, record in found if record is None or (record["noisy"] and not noisy) or "refused" in record]


def make_launches(launches: Sequence[Launch], store: Store, *, noisy: bool = False, steps: int | None = None) -> None:
    """Make what is missing, one launch at a time.

    With `noisy` a machine that is not quiet is not waited for, and figures are marked; a later call without it makes
    them again. `steps` replaces the number of steps that is timed. Raises SystemExit where another process launches,
    where the machine stays loud, and RuntimeError where a process of a launch fails.
    """
    _prepare_imports(launches)
    with store.launching() as mine:
        if not mine:
            raise SystemExit(f"another process launches for {store.path}: times need the machine alone")
        todo = launches_left(launches, store.read(), noisy=noisy)
        for count, launch in enumerate(todo, 1):
            before = _quiet(launch, noisy=noisy)
            record = made(launch, before, steps)
            store.add(record)
            told = record.get("refused") or ", ".join(
                f"{name} {value:.4g}" for name, value in record["figures"].items()
            )
            mark = "~ " if record["noisy"] else ""
            print(f"[{count}/{len(todo)}] {launch.key}: {mark}{told[:200]}", file=sys.stderr, flush=True)


def made(launch: Launch, before: float, steps: int | None = None) -> dict[str, Any]:
    """Launch the processes, measure, and end them; returns the record, which tells `before`, the cores of others."""
    began = load()
    record = {
        "key": launch.key, "name": launch.name, "processes": launch.processes, "link": launch.link,
        "number": launch.number, "task": launch.task, "settings": dict(launch.settings), "noisy": False,
        "versions": versions(), "machine": machine(), "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        if launch.wire is not None:
            try:
                stack.enter_context(laid(launch.wire))
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or error
                return record | {"refused": f"no link of {launch.link} Mbit/s (root rights, ip and tc): {said}".strip()}
        figures, during = _measured(launch, steps)
    told = {"figures": figures, "others": [round(before, 2), round(during, 2)], "load": [began, load()]}
    return record | told | {"noisy": max(before, during) > QUIET}


def _measured(launch: Launch, steps: int | None) -> tuple[dict[str, float], float]:
    """The figures, and how many cores other programs used meanwhile."""
    settings = {**launch.settings, **({} if steps is None else {"steps": steps})}
    try:
        task = partial(prepared, launch.task, settings)
        team = Team(task, launch.wire, num_processes=launch.processes, pinned=launch.pinned)
        try:
            wall, used, own = time.perf_counter(), busy_seconds(interrupts=False), time.process_time()
            answers = team.ask("measure")
            own = time.process_time() - own + sum(seconds for _, seconds in answers)
            others = (busy_seconds(interrupts=False) - used - own) / (time.perf_counter() - wall)
        finally:
            team.stop()
    except EOFError as error:
        raise RuntimeError(f"{launch.key}: a process of the launch ended before it had measured: see above") from error
    names = list(answers[0][0])
    return {name: float(f"{max(figures[name] for figures, _ in answers):.12g}") for name in names}, max(0.0, others)


def prepared(task: str, settings: Mapping[str, Any]) -> tuple[None, Callable[[Any], tuple[dict[str, float], float]]]:
    """What a process of a launch does: build, and measure when it is asked; its answer has the CPU seconds, too.

    Each keeps freed memory, as a Trainer on several processes does, so that what is not a Trainer loses nothing by it.
    """
    keep_memory()
    module, _, function = task.partition(":")
    measure: Measure = getattr(importlib.import_module(module), function)(**settings)

    def answer(_: Any) -> tuple[dict[str, float], float]:
        begin = time.process_time()
        figures = measure()
        return figures, time.process_time() - begin

    return None, answer


def cores_of_others() -> float:
    """How many cores other programs use, watched for a moment."""
    used, own, wall = busy_seconds(interrupts=False), time.process_time(), time.perf_counter()
    time.sleep(LOOK)
    taken = busy_seconds(interrupts=False) - used - (time.process_time() - own)
    return max(0.0, taken / (time.perf_counter() - wall))


def _quiet(launch: Launch, *, noisy: bool) -> float:
    """Wait until others use at most `QUIET` cores; returns how many they use. Raises SystemExit when it takes long."""
    begin = time.monotonic()
    while (others := cores_of_others()) > QUIET and not noisy:
        if time.monotonic() - begin > PATIENCE:
            raise SystemExit(
                f"other programs used more than {QUIET} cores for {PATIENCE:.0f} s: give the same command on a quiet "
                "machine and it goes on, or give it --noisy, and its figures are marked"
            )
        print(f"{launch.key} waits: other programs use {others:.1f} cores", end="\r", file=sys.stderr, flush=True)
    return others


def _prepare_imports(launches: Sequence[Launch]) -> None:
    """Let the processes to come find this folder and the shared one, and start from one that has what they import."""
    folders = [str(HERE), str(SHARED)]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*(each for each in folders if each not in known), *known])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tasks = sorted({launch.task.partition(":")[0] for launch in launches})
    multiprocessing.set_forkserver_preload(["torch", "stretto.trainer.distributed", "harness.launches", *tasks])
