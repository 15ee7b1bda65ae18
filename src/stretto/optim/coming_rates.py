"""The learning rates that an optimizer's coming updates will have, as its scheduler will set them."""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch

Scheduler = Callable[[Any], Any]  # as the user gives it: optimizer -> scheduler
Options = list[dict[str, Any]]  # one a group, without its parameters


class FutureRates:
    """The learning rates that each parameter group will have at its next updates.

    A copy of the optimizer, with the same groups but nothing to train, goes through the schedule ahead of it, so the
    optimizer and its own scheduler are not touched. The schedule must be a function of the number of updates. If the
    current rate is not the schedule's (changed by hand, or from a checkpoint with other settings), the coming rates
    are scaled by the same factor. Without a scheduler they equal the current rate.

    Make it before the optimizer's own scheduler, which begins by changing the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None = None) -> None:
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._start = copy.deepcopy([without_parameters(group) for group in optimizer.param_groups])
        self._restart()

    def sum(self, group: int, updates: int, ahead: float) -> float:
        """The sum of the next `ahead` rates after `updates` updates; a fraction of an update counts in part."""
        now = float(self.optimizer.param_groups[group]["lr"])
        if self._scheduler is None:
            return now * ahead
        self._look(updates, updates + int(ahead))
        rates = [self._window[later][group] for later in range(int(ahead) + 1)]
        total = sum(rates[:-1]) + (ahead - int(ahead)) * rates[-1]
        return total if rates[0] in (0, now) else total * (now / rates[0])

    def _restart(self) -> None:
        self._first = 0  # the update that the window begins with
        self._window: deque[list[float]] = deque()
        self._coming = rates(self.optimizer, self._start, self._scheduler)

    def _look(self, first: int, last: int) -> None:
        if first < self._first:  # an earlier checkpoint was loaded
            self._restart()
        while self._first < first:
            self._window.popleft() if self._window else next(self._coming)
            self._first += 1
        while len(self._window) <= last - first:
            self._window.append(next(self._coming))


def rates(optimizer: torch.optim.Optimizer, start: Options, scheduler: Scheduler | None) -> Iterator[list[float]]:
    """Each group's rate before the first update, before the second, and so on."""
    if scheduler is None:
        return
    rehearsal = copy_without_parameters(optimizer, start)
    schedule = scheduler(rehearsal)
    while True:
        yield [float(group["lr"]) for group in rehearsal.param_groups]
        rehearsal.step()  # changes nothing without gradients; a scheduler wants to have seen it
        try:
            schedule.step()
        except (ValueError, LookupError):  # it ends here (OneCycleLR); the real one will say so, should training go on
            break
    yield from repeat([float(group["lr"]) for group in rehearsal.param_groups])


def copy_without_parameters(optimizer: torch.optim.Optimizer, start: Options) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same groups, made as unpickling does, with nothing to train."""
    result = type(optimizer).__new__(type(optimizer))
    groups = [{**copy.deepcopy(options), "params": [torch.zeros(1)]} for options in start]
    result.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return result


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group of parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
