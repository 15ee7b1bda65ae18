"""Float32 masters of low-precision weights: a step smaller than half a unit in the last place is not lost."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError


class Masters:
    """The tensors an optimizer steps, where they are not the parameters themselves.

    `Masters({parameter: its float32 copy})`; any other parameter is its own master (mixed precision training,
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.1). Build the optimizer on `of(p)`. Micro-batches' gradients
    are added up here, in float32: call `collect` after each backward. Parameters follow their masters, so setting a
    parameter by hand lasts until the next step only.
    """

    def __init__(self, copies: Mapping[Tensor, nn.Parameter] | None = None) -> None:
        self.copies = dict(copies or {})

    def of(self, parameter: Tensor) -> Tensor:
        """What the optimizer steps for a parameter."""
        return self.copies.get(parameter, parameter)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for an optimizer that would step parameters instead of their masters."""
        if any(p in self.copies for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer steps the low-precision parameters themselves: build it on what it is given, which are "
                "their float32 masters, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )

    def collect(self) -> None:
        """Move the gradients of a micro-batch from the parameters to the masters, adding to what is there."""
        if self.copies:
            self._collect()

    @torch.no_grad()
    def _collect(self) -> None:
        for parameter, master in self.copies.items():
            if parameter.grad is not None:
                if master.grad is None:
                    master.grad = parameter.grad.to(master.dtype)
                else:
                    master.grad.add_(parameter.grad)
                parameter.grad = None

    def step(self, inner: Callable[[], object]) -> None:
        """Let `inner` step the masters, and round them into the parameters, in place."""
        self.collect()
        inner()
        if self.copies:
            with torch.no_grad():
                for parameter, master in self.copies.items():
                    parameter.copy_(master)

    @torch.no_grad()
    def follow(self) -> None:
        """Round the masters into the parameters, unnoticed by graphs in flight: something else has changed them."""
        for parameter, master in self.copies.items():
            parameter.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The masters, in the order of the parameters."""
        return {"masters": [master.detach() for master in self.copies.values()]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises ValueError if it is of other parameters."""
        shapes = [tuple(saved.shape) for saved in state["masters"]]
        wanted = [tuple(master.shape) for master in self.copies.values()]
        if shapes != wanted:
            raise ValueError(f"masters of shapes {shapes}, {wanted} are wanted")
        for master, saved in zip(self.copies.values(), state["masters"], strict=True):
            master.copy_(saved)
