"""The exceptions of Stretto. Every message names the values, the place and the remedy."""

import difflib
from collections.abc import Iterable


class StrettoError(Exception):
    """The base class of every error that Stretto raises on purpose.

    If one process raises it for all of them, `said_by` is that process's rank in the others.
    """

    said_by: int | None = None


class UsageError(StrettoError, ValueError):
    """A user's mistake: an unknown name, a value out of range, parts that do not fit. The command line exits with 2."""


class ScheduleError(StrettoError, ValueError):
    """A schedule that cannot run: incomplete, contradictory or deadlocked. The message names the first such action."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for a message: the name in `known` that is closest to `name`, and the list of `known`.

    >>> nearest("gredy", ["greedy", "backprop"])
    "did you mean 'greedy'? Choose from backprop, greedy"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not names:
        return "there are none"
    listing = f"from {', '.join(names)}"
    return f"did you mean '{close[0]}'? Choose {listing}" if close else f"choose {listing}"
