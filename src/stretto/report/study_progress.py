"""How far a study is whose page is written while its runs are made."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """The state of a study that is being made.

    `share` of its steps are made, from 0 to 1. `seconds_left` is an estimate, None where there is none yet. The page
    loads itself again after `reload` seconds; it was written at `written`, in seconds since 1970.
    """

    share: float
    seconds_left: float | None
    reload: float
    written: float = field(default_factory=time.time)


def runs_told(finished: int, planned: int) -> str:
    """How many runs of a study are finished.

    >>> runs_told(7, 16)
    '7 of 16 runs are finished'
    """
    return f"{finished} of {planned} run{'s' * (planned != 1)} {'is' if 1 in (finished, planned) else 'are'} finished"


def time_told(seconds: float | None) -> str:
    """A time that is left, in words; empty if it is not known.

    >>> time_told(200)
    'about 3 minutes left'
    """
    if seconds is None:
        return ""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:.0f} {unit}s left"
        if seconds >= 0.9 * length:
            return f"about 1 {unit} left"
    return "less than a minute left"
