"""Cures for delay in the optimizer's step, as options of asynchronous pipelines: feedback=, rotate= and refresh=."""

import math
from collections.abc import Callable
from typing import Literal

from stretto.errors import UsageError
from stretto.methods.cure import Cure, Place, Rotation
from stretto.options.checks import is_among, is_number, is_whole, shown

Feedback = float | Literal["delay"]
Rotate = bool | Literal["one-sided"]
STEP_CURES = ("feedback", "rotate", "refresh")
MOST_REFRESH = 10**9


def step_cure(name: str, feedback: Feedback, rotate: Rotate, refresh: int | None) -> Cure:
    """The cure of these options, of method `name`. Raises UsageError for a value out of range.

    feedback: the same number on all stages, 0 for none, or "delay": each stage's own delay.
    """
    return Cure(feedback=feedback_of(name, feedback), rotate=rotation_of(name, rotate, refresh))


def feedback_of(name: str, feedback: Feedback) -> Callable[[Place], float] | None:
    """How much feedback a stage gets; None for none on any."""
    if is_among(feedback, ("delay",)):
        return lambda place: place.delay
    if isinstance(feedback, str) or not is_number(feedback) or not 0 <= feedback < math.inf:
        raise UsageError(
            f"{name}(feedback={shown(feedback)}): a number of 0 or more, such as 1 for a delay of one update, or "
            "'delay' for each stage's own"
        )
    c = float(feedback)
    return (lambda _: c) if c else None


def rotation_of(name: str, rotate: Rotate, refresh: int | None) -> Rotation | None:
    """The rotation of matrices; None for none."""
    if not isinstance(rotate, bool) and not is_among(rotate, ("one-sided",)):
        raise UsageError(f"{name}(rotate={shown(rotate)}): choose True, 'one-sided' or False")
    if refresh is not None and rotate is False:
        raise UsageError(f"{name}(refresh={shown(refresh)}) needs a basis to refresh: add rotate=True or 'one-sided'")
    if refresh is not None and not (is_whole(refresh) and 1 <= refresh <= MOST_REFRESH):
        raise UsageError(f"{name}(refresh={shown(refresh)}): a whole number of updates, at least 1")
    if rotate is False:
        return None
    return Rotation(two_sided=rotate is True, refresh=10 if refresh is None else refresh)


def cures_in_words(cure: Cure) -> str:
    """The cures of `step_cure` for a method's summary: ", feedback, rotation", or nothing."""
    named = (("feedback", cure.feedback is not None), ("rotation", cure.rotate is not None))
    return "".join(f", {name}" for name, on in named if on)
