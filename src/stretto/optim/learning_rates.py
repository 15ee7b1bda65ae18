"""Learning rates: warm-up, scaling to a batch size, the rates of coming updates, and rates divided for a delay."""

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch

from stretto.errors import UsageError, nearest
from stretto.options.checks import MOST_DELAY, function, is_among, is_number, is_whole, number, of_kind, shown, whole
from stretto.options.user_errors import called

MOST_UPDATES = 10**15  # the largest number of updates
Factor = Callable[[int], float]  # the number of finished updates -> a factor of the rate


def warmup(
    updates: int, *, start: float = 0.0, then: Factor | None = None
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR]:
    """A scheduler for Trainer's `scheduler=`: the rate grows linearly to its full value at update `updates`.

    `start` is the share of the full rate that it grows from: 1/k for a rate scaled to k times the batch (Goyal et al.
    2017, arXiv 1706.02677, section 2.2). `then` maps the number of updates since to a factor of the rate, such as
    `stretto.optim.cosine(900)`. Raises UsageError for values out of range.
    """
    check_updates(updates)
    if not (is_number(start) and 0 <= start <= 1):
        raise UsageError(f"start={shown(start)}: a share of the full rate, from 0 to 1")
    if then is not None:
        factor_of = called("then", then, 0, wanted="a function of the updates since, such as optim.cosine(900)")
        of_kind("then(0)", factor_of, (int, float), "a function that returns a factor of the rate")

    def factor(finished: int) -> float:
        if finished < updates:
            return start + (1 - start) * (finished + 1) / updates
        return 1.0 if then is None else then(finished - updates)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def cosine(updates: int) -> Factor:
    """A factor for `warmup`'s `then=`: from 1 to 0 along half a cosine over `updates` updates, then 0."""
    check_updates(updates)
    return lambda finished: (1 + math.cos(math.pi * min(finished / updates, 1))) / 2 if updates else 0.0


def check_updates(updates: Any) -> None:
    """Raise UsageError unless `updates` is a whole number from 0 to MOST_UPDATES."""
    if not is_whole(updates) or not 0 <= updates <= MOST_UPDATES:
        raise UsageError(
            f"updates={shown(updates)}: a whole number of updates, 0 or more (and at most {MOST_UPDATES:,})"
        )


MOST_EXAMPLES = 10**12  # the largest batch size, in examples
Rule = Callable[[float, float, float], tuple[float, float]]


def momentum_rule(lr: float, momentum: float, share: float) -> tuple[float, float]:
    """`m' = m^k`, `lr' = lr k (1 - m') / (1 - m)`, for k times the batch (Kosson et al. 2021, arXiv 2003.11666).

    The total contribution of an example's gradient, and the number of examples over which it decays, stay the same.
    """
    scaled: float = momentum**share
    return lr * share * (1 - scaled) / (1 - momentum), scaled


def linear_rule(lr: float, momentum: float, share: float) -> tuple[float, float]:
    """`lr' = lr k`: one step replaces k small ones (Goyal et al. 2017, arXiv 1706.02677)."""
    return lr * share, momentum


def sqrt_rule(lr: float, momentum: float, share: float) -> tuple[float, float]:
    """`lr' = lr sqrt(k)`: the variance of a step stays the same (Krizhevsky 2014, arXiv 1404.5997)."""
    return lr * math.sqrt(share), momentum


RULES: dict[str, Rule] = {"momentum": momentum_rule, "linear": linear_rule, "sqrt": sqrt_rule}


def scale_for_batch(
    lr: float, momentum: float, batch_size: int, *, to: int, rule: str = "momentum"
) -> tuple[float, float]:
    """The learning rate and momentum for updates of `to` examples, from those that suit `batch_size` examples.

    `rule="momentum"` scales both, for torch.optim.SGD's momentum, `v <- m v + g; w <- w - lr v`. "linear" and "sqrt"
    scale the rate of any optimizer and keep the momentum. "linear" suits SGD while gradient noise dominates the
    steps, "sqrt" Adam and LAMB. A large rate needs a warm-up (`stretto.optim.warmup`). Raises UsageError for values
    out of range.
    """
    if not (is_number(lr) and 0 < lr < math.inf):
        raise UsageError(f"lr={shown(lr)}: a learning rate is a positive number")
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise UsageError(f"momentum={shown(momentum)}: choose a value from 0 up to, but not including, 1")
    for name, size in (("batch_size", batch_size), ("to", to)):
        if not is_whole(size) or not 1 <= size <= MOST_EXAMPLES:
            raise UsageError(
                f"{name}={shown(size)}: a whole number of examples, at least 1 (and at most {MOST_EXAMPLES:,})"
            )
    if not is_among(rule, RULES):
        raise UsageError(f"unknown rule {shown(rule)}: {nearest(str(rule), RULES)}")
    return RULES[rule](lr, momentum, to / batch_size)


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
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


Step = Callable[[], object]


def divisor(delay: float, finished: int, until: int) -> float:
    """max(D, 1)^p with p = 1 - min(k/K, 1) after k of K updates (Yang et al. 2021, arXiv 1910.05124, section 3.1).

    D is the mean delay over micro-batches, in updates; k is `finished`, K is `until`. For D < 1 the divisor is 1.
    """
    return float(max(delay, 1) ** (1 - min(finished / until, 1)))


class Rescheduled:
    """An optimizer's step at its learning rate divided by `divisor`, for a stage with this `delay` in updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, delay: float, until: int, step: Step) -> None:
        of_kind("Rescheduled: optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch.optim")
        number("Rescheduled: delay", delay, 0, MOST_DELAY)
        whole("Rescheduled: until", until, 1)
        function("Rescheduled: step", step, "a function without arguments, such as optimizer.step", 0)
        self.optimizer = optimizer
        self.delay = delay
        self.until = until
        self._step = step

    def step(self, finished: int) -> None:
        """Take the step after `finished` updates; afterwards the groups have their own learning rates again."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        factor = divisor(self.delay, finished, self.until)
        try:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / factor
            self._step()
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
