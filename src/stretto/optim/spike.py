"""Spike compensation: a gradient that arrives D updates late is applied with a larger weight on arrival."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.optim.direction import root, second_moment
from stretto.optim.muon_with_adamw import ShardedMuon, stepping
from stretto.optim.spike_coefficients import corrected_coefficients, nesterov_coefficients, spike_coefficients
from stretto.optim.traits import check_known, function_of, rows_of
from stretto.optim.update_feedback import stepped
from stretto.optimizers import IN_STEP
from stretto.options.checks import MOST_DELAY, number, of_kind


class SpikeCompensation:
    """A step of the optimizer with the numerators of `optim/spike_coefficients.py`.

    SGD with momentum, Adam, AdamW and NAdam take their own step, then the difference to the compensated one is added;
    Muon, SOAP and Lion read the delay in their step, and so do the groups of `stretto.optim.muon`, each by its rule.
    Schedulers, state and checkpoints stay those of the optimizer. Raises UsageError for any other optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, delay: float) -> None:
        of_kind("SpikeCompensation: optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch.optim")
        number("SpikeCompensation: delay", delay, 0, MOST_DELAY)
        check_known(optimizer, "late", "spike compensation", "use such an optimizer, or a method without it")
        refuse_complex(optimizer)
        self.optimizer = optimizer
        self.delay = delay

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; at delay 0 as the optimizer does, to the last bit."""
        if self.delay == 0:
            self.optimizer.step()
            return
        pending = [
            (row, parameter, total_gradient(parameter, group), group)
            for row, group in zip(rows_of(self.optimizer), self.optimizer.param_groups, strict=True)
            if row is None or row.late != IN_STEP
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        with delayed(self.optimizer, self.delay):
            self._own_step()
        for row, parameter, gradient, group in pending:
            assert row is not None, "its numerator is known"
            function_of(row.late)(parameter, gradient, self.optimizer.state[parameter], group, self.delay)

    def _own_step(self) -> None:
        optimizer = self.optimizer
        is_torchs_muon = isinstance(optimizer, torch.optim.Muon)
        with without_gradients(stepped(optimizer) if is_torchs_muon else ()):
            optimizer.step()  # of torch's Muon hooks alone, and what a scheduler counts
        if is_torchs_muon:
            stepping(ShardedMuon, optimizer.state, optimizer.param_groups).step()


def refuse_complex(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.SGD) and any(p.is_complex() for p in stepped(optimizer)):
        raise UsageError(
            f"spike compensation of {type(optimizer).__name__} is of real numbers; this one has complex parameters: "
            "use torch.optim.SGD, or a method without it"
        )


@contextmanager
def delayed(optimizer: torch.optim.Optimizer, delay: float) -> Iterator[None]:
    """In this block, groups whose steps know a "delay" have one."""
    rows = zip(rows_of(optimizer), optimizer.param_groups, strict=True)
    groups = [group for row, group in rows if row is not None and row.late == IN_STEP]
    for group in groups:
        group["delay"] = delay
    try:
        yield
    finally:
        for group in groups:
            del group["delay"]


def total_gradient(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The gradient that a step of torch.optim.SGD, Adam or NAdam averages: with weight decay, unless decoupled."""
    assert parameter.grad is not None
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    decay = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
    return gradient.add(parameter, alpha=decay) if decay else gradient


def add_sgd_difference(
    parameter: Tensor, gradient: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], delay: float
) -> None:
    """Turn a step `w - lr v` into `w - lr (a v + b g)`, v with g in it."""
    a, b = spike_coefficients(group["momentum"], delay)
    rate = float(group["lr"])
    parameter.add_(state["momentum_buffer"], alpha=rate * (1 - a)).add_(gradient, alpha=-rate * b)


def add_adam_difference(
    parameter: Tensor, gradient: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], delay: float
) -> None:
    """Turn a step of Adam, AdamW or NAdam into that with the numerator `a m + b g`, m with g in it."""
    (a, b), (own_a, own_b) = (adam_coefficients(state, group, each) for each in (delay, 0.0))
    norm, rate = root(second_moment(state, group), state, group), float(group["lr"])
    parameter.addcdiv_(state["exp_avg"], norm, value=rate * (own_a - a))
    parameter.addcdiv_(gradient, norm, value=rate * (own_b - b))


def adam_coefficients(state: Mapping[str, Any], group: Mapping[str, Any], delay: float) -> tuple[float, float]:
    """a and b of the step that a state has counted last."""
    beta, step = float(group["betas"][0]), float(state["step"])
    if "mu_product" not in state:
        return corrected_coefficients(beta, delay, step)
    return nesterov_coefficients(beta, float(group["momentum_decay"]), float(state["mu_product"]), delay, step)


@contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In this block the parameters have no gradients; after it they have them again."""
    hidden = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient
