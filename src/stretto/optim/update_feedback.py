"""Update-level error feedback: a step also makes up for what the last one would have been, had it known this gradient.

`w <- w - (u + c (u - u_prev))`, u the optimizer's whole step with its rate and decay (arXiv 2606.30634). The first step
of a parameter is plain.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError

LAST = "last_step"  # the key of u_prev in a parameter's state, which checkpoints and loading keep with all the others


class UpdateFeedback:
    """An optimizer's step with `c` times its difference to the step before.

    Steps add up to a telescope: after any number of them the weights are `z - c u`, u the last step and z the plain sum
    of the steps, started c first steps away from the initial weights: `plain_sums` gives it. Keeps u: one tensor a
    parameter, in the optimizer's state and in the dtype of what it steps; a second one for the time of a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, c: float, step: Callable[[], object]) -> None:
        refuse_low_precision(optimizer, "feedback")
        self.optimizer = optimizer
        self.c = c
        self._step = step

    @torch.no_grad()
    def step(self) -> None:
        """Take the optimizer's step, and add c times its difference to the last one."""
        before = {parameter: parameter.detach().clone() for parameter in stepped(self.optimizer)}
        self._step()
        for parameter, former in before.items():
            state, moved = self.optimizer.state.get(parameter, {}), former.sub_(parameter)
            last = state.get(LAST)
            if last is not None:
                parameter.add_(last.sub_(moved), alpha=self.c)
            elif parameter.grad is None:  # never stepped: an optimizer sets up the state of its first gradient itself
                continue
            self.optimizer.state[parameter][LAST] = moved

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
