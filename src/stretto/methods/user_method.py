"""Methods of a user's own: a function in a file or a package of theirs, `path/to/file.py:name`.

The name is all that other processes, run folders and checkpoints need to build the method again.
"""

import hashlib
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from stretto.errors import ScheduleError, UsageError
from stretto.methods.definition import Method
from stretto.methods.synchronous_pipelines import in_microbatches
from stretto.options.checks import of_kind, shown
from stretto.options.import_object import import_object
from stretto.options.user_errors import explained
from stretto.schedule import Schedule
from stretto.schedule.csv_file import read_csv

GIVE = (
    "a function with keyword-only options that returns a stretto.Method, or a function of num_stages and num_workers "
    "(and microbatches) that returns a stretto.schedule.Schedule"
)
COUNTS = ("num_stages", "num_workers", "microbatches")


def own_method(text: str) -> Callable[..., Method]:
    """The function that builds the method `text` names: the user's, or one that trains by the user's schedule.

    Raises UsageError where there is no such function, and, when it is called, where it returns something else.
    """
    function = import_object(text, "method")
    if not callable(function):
        raise UsageError(f"method {text!r} is {shown(function)}: give {GIVE}")
    parameters = inspect.signature(function).parameters.values()
    needed = tuple(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    if not needed:
        return checked(text, function)
    if needed == COUNTS[:2]:
        return of_schedule(text, function)
    if needed == COUNTS:
        return of_minibatch(text, function)
    raise UsageError(f"method {text!r} takes {', '.join(needed)}: give {GIVE}")


def checked(text: str, build: Callable[..., Any]) -> Callable[..., Method]:
    """`build`, with its result checked; errors name it as `text`."""

    @wraps(build)
    def built(**options: Any) -> Method:
        result = attempted(text, build, **options)
        if not isinstance(result, Method):
            raise UsageError(f"method {text!r} returned {shown(result)}: give {GIVE}")
        return result

    return built


def of_schedule(text: str, lay: Callable[[int, int], Any]) -> Callable[..., Method]:
    """Plain training in the order of a schedule."""

    def built() -> Method:
        return trained_by(text, lay)

    return built


def of_minibatch(text: str, lay: Callable[[int, int, int], Any]) -> Callable[..., Method]:
    """Plain training in the order of a schedule of micro-batches: by default one a worker, at least 4."""

    def built(*, microbatches: int | None = None) -> Method:
        return trained_by(text, in_microbatches(lay, microbatches))

    return built


def trained_by(text: str, lay: Callable[[int, int], Any]) -> Method:
    """Plain training by a schedule that finishes every minibatch."""

    def laid(num_stages: int, num_workers: int) -> Schedule:
        schedule = attempted(text, lay, num_stages, num_workers)
        if not isinstance(schedule, Schedule):
            raise UsageError(f"method {text!r} returned {shown(schedule)}: give {GIVE}")
        if schedule.drain:
            raise UsageError(
                f"schedule {text!r} on {num_stages} stages works on a minibatch for {schedule.drain} more turns after "
                "the one that it enters in, and does not say which weights its backwards see: give a function that "
                "returns a Method with this schedule, synchronous=False and weights= (CONTRIBUTING.md)"
            )
        return schedule

    return Method(name=text, summary="a schedule of one's own, trained as backprop", schedule=laid, synchronous=True)


def attempted(text: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a user's function. Its errors become UsageError, which names it as `text`."""
    with explained(f"method {text!r} failed with", passing=(UsageError, ScheduleError)):
        return function(*arguments, **options)


def csv(*, path: str | None = None, digest: str | None = None) -> Method:
    """Train by the schedule in a file. digest: the first 12 digits of the SHA-256 of its bytes, which must match.

    The digest becomes part of the method's name, and so of a run's identity: a run does not go on with another file.
    """
    if path is None:
        raise UsageError("csv: which file? path='schedule.csv', such as stretto show --csv writes")
    schedule = read_csv(path)
    actual = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    if digest is not None:
        of_kind("csv: digest", digest, str, "12 hexadecimal digits, or leave it out")
        if digest != actual:
            raise UsageError(
                f"csv: {path} has the digest {actual}, not {digest}: it is not the file of that run any more"
            )

    def lay(num_stages: int, num_workers: int) -> Schedule:
        if (num_stages, num_workers) != (schedule.num_stages, schedule.num_workers):
            raise UsageError(
                f"csv: {path} is for {schedule.num_stages} stages on {schedule.num_workers} workers, but there are "
                f"{num_stages} stages on {num_workers} workers: split the model in as many, and leave workers= out"
            )
        return schedule

    return Method(
        name="csv",
        summary="a list of actions from a file",
        schedule=lay,
        synchronous=True,
        workers=lambda _: schedule.num_workers,
        options={"path": str(path), "digest": actual},
    )
