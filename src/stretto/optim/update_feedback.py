"""Update-level error feedback: a step also makes up for what the last one would have been, had it known this gradient.

`w <- w - (u + c (u - u_prev))`, u the optimizer's whole step with its rate and decay (arXiv 2606.30634). The first step
of a parameter is plain.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import function, number, of_kind

LAST = "last_step"  # the key of u_prev in a parameter's state, which checkpoints and loading keep with all the others


class UpdateFeedback:
    """An optimizer's step with `c` times its difference to the step before.

    Steps add up to a telescope: after any number of them the weights are `z - c u`, u the last step and z the plain sum
    of the steps, started c first steps away from the initial weights: `plain_sums` gives it. Keeps u: one tensor a
    parameter, in the optimizer's state and in the dtype of what it steps; a second one for the time of a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, c: float, step: Callable[[], object]) -> None:
        of_kind("UpdateFeedback: optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch.optim")
        number("UpdateFeedback: c", c)
        function("UpdateFeedback: step", step, "a function without arguments, such as optimizer.step", 0)
        refuse_low_precision(optimizer, "feedback")
        self.optimizer = optimizer
        self.c = c
        self._step = step

    @torch.no_grad()
    def step(self) -> None:
        """Take the optimizer's step, and add c times its difference to the last one."""
        known, state = list(stepped(self.optimizer)), self.optimizer.state
        moved = [parameter.detach().clone() for parameter in known]
        self._step()
        if not known:
            return
        torch._foreach_sub_(moved, known)
        again = [p for p in known if LAST in state.get(p, {})]
        if again:
            last = [state[parameter][LAST] for parameter in again]
            torch._foreach_sub_(last, [u for p, u in zip(known, moved, strict=True) if LAST in state.get(p, {})])
            torch._foreach_add_(again, last, alpha=self.c)
        for parameter, u in zip(known, moved, strict=True):
            # a parameter without a gradient so far: an optimizer sets up the state of its first one itself
            if parameter.grad is not None or LAST in state.get(parameter, {}):
                state[parameter][LAST] = u

    def plain_step(self) -> None:
        """Take the optimizer's step, and forget the last one: the next step of `step` is plain, as the first."""
        for parameter in stepped(self.optimizer):
            if parameter in self.optimizer.state:
                self.optimizer.state[parameter].pop(LAST, None)
        self._step()


def stepped(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters of an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def plain_sums(optimizer: torch.optim.Optimizer, c: float) -> dict[Tensor, Tensor]:
    """`w + c u` of each parameter that has made a step with feedback c: the sum of its steps without the feedback."""
    known: dict[Tensor, dict[str, Any]] = {p: optimizer.state[p] for p in stepped(optimizer) if p in optimizer.state}
    return {p: torch.add(p.detach(), state[LAST], alpha=c) for p, state in known.items() if LAST in state}


def refuse_low_precision(optimizer: torch.optim.Optimizer, option: str) -> None:
    """Raise UsageError for parameters of 16 bits that the optimizer steps itself."""
    low = {p.dtype for p in stepped(optimizer) if p.dtype in (torch.bfloat16, torch.float16)}
    if low:
        raise UsageError(
            f"{option} with parameters of {str(min(low, key=str)).removeprefix('torch.')}: a step's digits are lost as "
            "it is rounded into so few bits, and little more than their noise would be left of it; use "
            "precision='bf16', whose float32 masters the optimizer steps, or leave the option out"
        )
