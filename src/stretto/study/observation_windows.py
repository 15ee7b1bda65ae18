"""When a run is observed: in a few windows of two minibatches, because an observer copies weights."""

import math
from collections.abc import Sequence

from stretto.report.record import Observation
from stretto.trainer.observer import Observer
from stretto.trainer.trainer import Trainer

WINDOWS = 8
SPACING = 20  # steps a window, at least: in a window a step takes up to twice as long
MINIBATCHES = 2


class Lookout:
    """Call `before` each step and `after` it; some of the latter give an observation."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self._trainer = trainer
        self._steps = steps
        self._minibatches = MINIBATCHES if trainer.schedule.drain else 1  # all are alike where each is waited for
        self._starts = starts(steps, trainer.schedule.drain)
        self._window: tuple[int, Observer] | None = None

    def before(self, step: int) -> None:
        """Open a window if it is time for one and the last one is through."""
        if self._window is None and step in self._starts:
            self._window = step, self._trainer.observe(self._minibatches)

    def after(self, step: int) -> Observation | None:
        """What a window saw, once everything in it has been through, or the run has ended."""
        if self._window is None or (self._window[1].watching and step < self._steps):
            return None
        (start, observer), self._window = self._window, None
        observer.stop()
        seen = observer.figures()
        return Observation(
            step=start,
            mismatch=finite(seen.mismatch),
            prediction_error=finite(seen.prediction_error),
            unpredicted_error=finite(seen.unpredicted_error),
            weight_bytes=seen.weight_bytes,
            activation_bytes=seen.activation_bytes,
        )


def starts(steps: int, drain: int) -> set[int]:
    """The steps at which windows open, closer together at the start, as evaluations are.

    The pipeline is full by then: after one drain every gradient is as old as it gets, after two so is every version.
    """
    first, last = min(2 * drain + 2, steps), steps - drain - MINIBATCHES + 1
    windows = min(WINDOWS, steps // SPACING)
    if last <= first or windows < 2:
        return {first}
    return {first + round((last - first) * (i / (windows - 1)) ** 2) for i in range(windows)}


def finite(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Numbers that JSON can hold; a run that is about to diverge has others."""
    return tuple(value if value is not None and math.isfinite(value) else None for value in values)
