"""One action on the time axis of its worker."""

from typing import NamedTuple

from stretto.schedule.action import Action


class Span(NamedTuple):
    """`worker` is busy with `action` from `start` to `end`, in any unit of time."""

    worker: int
    action: Action
    start: float
    end: float
