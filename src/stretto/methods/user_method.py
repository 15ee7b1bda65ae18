"""Methods of a user's own: a function in a file or a package of theirs, `path/to/file.py:name`.

The name is all that other processes, run folders and checkpoints need to build the method again.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from stretto.errors import ScheduleError, UsageError
from stretto.methods.definition import Method
from stretto.methods.synchronous_pipelines import in_microbatches
from stretto.options.checks import shown
from stretto.options.import_object import import_object
from stretto.options.user_errors import error_place
from stretto.schedule import Schedule

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
    try:
        return function(*arguments, **options)
    except (UsageError, ScheduleError):
        raise
    except Exception as error:
        raise UsageError(f"method {text!r} failed with {type(error).__name__}: {error}{error_place(error)}") from error
