"""The learning rates of an optimizer's next updates, as its scheduler will set them."""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch

Scheduler = Callable[[Any], Any]  # as the user gives it: optimizer -> scheduler
Options = list[dict[str, Any]]  # one for each parameter group, without its parameters


class FutureRates:
    """The learning rates that each parameter group will have at its next updates.

    A copy of the optimizer, with the same groups and dummy parameters, runs through the schedule ahead of it, so the
    optimizer and its own scheduler are not touched. The schedule must be a function of the number of updates. If the
    current rate is not the schedule's (changed by hand, or from a checkpoint with other settings), the coming rates
    are scaled by the same factor. Without a scheduler they equal the current rate.

    Create it before the optimizer's own scheduler, whose constructor changes the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None = None) -> None:
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._start = copy.deepcopy([without_parameters(group) for group in optimizer.param_groups])
        self._restart()

    def sum(self, group: int, updates: int, ahead: float) -> float:
        """The sum of the next `ahead` learning rates after `updates` updates; `ahead` may have a fraction."""
        now = float(self.optimizer.param_groups[group]["lr"])
        if self._scheduler is None:
            return now * ahead
        self._move_window(updates, updates + int(ahead))
        rates = [self._window[later][group] for later in range(int(ahead) + 1)]
        total = sum(rates[:-1]) + (ahead - int(ahead)) * rates[-1]
        return total if rates[0] in (0, now) else total * (now / rates[0])

    def _restart(self) -> None:
        self._first = 0  # the index of the window's first update
        self._window: deque[list[float]] = deque()
        self._coming = rates(self.optimizer, self._start, self._scheduler)

    def _move_window(self, first: int, last: int) -> None:
        if first < self._first:  # an earlier checkpoint was loaded
            self._restart()
        while self._first < first:
            self._window.popleft() if self._window else next(self._coming)
            self._first += 1
        while len(self._window) <= last - first:
            self._window.append(next(self._coming))


def rates(optimizer: torch.optim.Optimizer, start: Options, scheduler: Scheduler | None) -> Iterator[list[float]]:
    """Yield the groups' rates at the first update, the second, and so on; a finite schedule repeats its last ones."""
    if scheduler is None:
        return
    dummy = copy_without_parameters(optimizer, start)
    schedule = scheduler(dummy)
    while True:
        yield [float(group["lr"]) for group in dummy.param_groups]
        dummy.step()  # no effect without gradients; torch warns of schedule.step() before optimizer.step()
        try:
            schedule.step()
        except (ValueError, LookupError):  # a finite schedule (OneCycleLR); the real one raises if training goes on
            break
    yield from repeat([float(group["lr"]) for group in dummy.param_groups])


def copy_without_parameters(optimizer: torch.optim.Optimizer, start: Options) -> torch.optim.Optimizer:
    """An optimizer of the same class and groups with dummy parameters, made without its constructor, as pickle does."""
    result = type(optimizer).__new__(type(optimizer))
    groups = [{**copy.deepcopy(options), "params": [torch.zeros(1)]} for options in start]
    result.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return result


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
