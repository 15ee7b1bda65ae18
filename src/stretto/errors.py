"""What went wrong, said so that a user can mend it: the values, the place, the remedy."""

import difflib
from collections.abc import Iterable


class StrettoError(Exception):
    """Every error that Stretto raises on purpose.

    On several processes one of them may have raised it first, for all: `said_by` is then its rank in the others.
    """

    said_by: int | None = None


class UsageError(StrettoError, ValueError):
    """A user's mistake: an unknown name, a value out of range, parts that do not fit. The command line exits with 2."""


class ScheduleError(StrettoError, ValueError):
    """A schedule that cannot be run: incomplete, contradictory or deadlocked. Names the first offending action."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which of `known` was probably meant by `name`, and what else there is.

    >>> nearest("gredy", ["greedy", "backprop"])
    "did you mean 'greedy'? Choose from backprop, greedy"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not names:
        return "there are none"
    listing = f"hoose from {', '.join(names)}"
    return f"did you mean '{close[0]}'? C{listing}" if close else f"c{listing}"
