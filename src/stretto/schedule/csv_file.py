"""Schedules as files, read and written: one minibatch as `to_csv` and torch.distributed.pipelining write it.

One row a worker, cells in the order of its actions, each a stage, a kind and a micro-batch; empty cells are pauses:

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

Every minibatch is finished before the next one enters: only a synchronous schedule can be written in this way.
"""

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import ScheduleError, UsageError
from stretto.options.checks import of_kind
from stretto.options.checks import path as check_path
from stretto.schedule.action import Action
from stretto.schedule.dataflow import Rules
from stretto.schedule.reach import Reach
from stretto.schedule.schedule import Schedule
from stretto.schedule.validity import check

CELL = re.compile(r"(\d{1,6})([A-Z_]+)(\d{1,6})?")
READ = "FCBIWU"
ADDED = {"R": "Trainer(clip=...)", "A": "Trainer(mesh=...)", "M": "Trainer(mesh=..., sync=...)"}


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in a file. Raises UsageError, with file and line, if it is not complete or can deadlock.

    The file has F and B (or I and W) of each stage and micro-batch, and C where a forward is run again. Without updates
    (U) each stage is updated after its last backward. R is left out: `clip=` adds it. Gradients reach every stage, as
    in backpropagation.
    """
    check_path("path", path)
    rows = {line: tuple(actions(path, line, cells)) for line, cells in lines(path)}
    if not any(rows.values()):
        raise UsageError(f"{path} holds no actions: give a row for each worker, 0F0,0F1,0B0,0B1")
    body, numbers = [*rows.values()], [*rows]
    for line, row in rows.items():
        if not row:
            raise UsageError(f"{path}, line {line}: a worker without actions: leave the line out")
    try:
        per_turn = 1 + max(action.microbatch for row in body for action in row)
        schedule = Schedule(tuple(body), per_turn)
        if not any(action.kind == "U" for row in body for action in row):
            schedule = Schedule(tuple(with_updates(row, per_turn) for row in body), per_turn)
        stages = schedule.num_stages
        check(schedule, Rules.of(schedule, Reach((*[None] * (stages - 1), stages - 1))))
    except ScheduleError as error:
        worker = re.search(r"worker (\d+)", str(error))
        where = f", line {numbers[int(worker[1])]}" if worker else ""
        raise UsageError(f"{path}{where}: {error}; a line is a worker, the first one worker 0") from error
    return schedule


def lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file with their line numbers, from 1 on, without empty lines at the end."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        rows = list(csv.reader(text.rstrip().splitlines(), strict=True))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}: give a file that stretto show --csv wrote"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no text in comma-separated columns: {error}") from error
    yield from enumerate(rows, start=1)


def actions(path: str | os.PathLike[str], line: int, cells: list[str]) -> Iterator[Action]:
    """The actions of a row. Raises UsageError for the first cell that is not an action."""
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        where = f"{path}, line {line}, column {column}: {cell.strip()[:40]!r}"
        match = CELL.fullmatch(cell.strip())
        if match is None or match[2] not in (*READ, *ADDED) or match[3] is None:
            raise UsageError(
                f"{where} is no action of a stage: write stage, kind and micro-batch, 0F3; kinds are {', '.join(READ)} "
                "(torch's files with sends and receives cannot be read)"
            )
        if match[2] in "AM":
            raise UsageError(f"{where}: leave it out, {ADDED[match[2]]} adds it")
        if match[2] != "R":
            yield Action(match[2], int(match[1]), int(match[3]))


def with_updates(row: tuple[Action, ...], per_turn: int) -> tuple[Action, ...]:
    """A row with each stage's update after its last action."""
    updated: list[Action] = []
    for position, action in enumerate(row):
        updated.append(action)
        if all(later.stage != action.stage for later in row[position + 1 :]):
            updated.append(Action("U", action.stage, per_turn - 1))
    return tuple(updated)


def to_csv(schedule: Schedule) -> str:
    """One minibatch as torch.distributed.pipelining's `_PipelineScheduleRuntime._load_csv` reads it ("compute_only").

    One row a worker, actions as stage, kind and micro-batch: forward F, whole backward B, input gradient I, weight
    gradient W. There the caller steps the optimizer after the last action, so updates are left out and only a
    synchronous schedule can be written: for others UsageError names the first action that does not fit. Heads and
    how far their gradients travel are not in the file either: torch runs it as backprop.
    """
    of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
    for worker, actions in enumerate(schedule.body):
        for position, action in enumerate(actions):
            if action.kind == "C":
                raise UsageError(
                    f"{action} of worker {worker} is a recompute, which torch.distributed.pipelining's file does not "
                    "know: export the method without recompute=, and wrap the stages in torch.utils.checkpoint there"
                )
            if action.microbatch < 0:
                raise UsageError(
                    f"{action} of worker {worker} belongs to an earlier minibatch: torch.distributed.pipelining runs "
                    "one minibatch at a time; export a synchronous schedule (gpipe, 1f1b, interleaved, zb-h1, ...)"
                )
            if action.kind == "U" and any(later.stage == action.stage for later in actions[position + 1 :]):
                raise UsageError(
                    f"{action} of worker {worker} comes before the minibatch's end: torch.distributed.pipelining "
                    f"leaves updates to its caller; export a schedule with one update a stage, after its last backward"
                )
    rows = (",".join(str(action) for action in actions if action.kind not in "RU") for actions in schedule.body)
    return "".join(f"{row}\n" for row in rows)
