"""Float32 master weights of low-precision parameters: small updates add up instead of being rounded away."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.options.checks import refuse


class Masters:
    """The float32 tensors that an optimizer steps in place of low-precision parameters.

    `Masters({parameter: its float32 copy})`; any other parameter is its own master (mixed precision training,
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.1). Build the optimizer on `of(p)`. The masters accumulate
    micro-batches' gradients in float32: call `collect` after each backward. Each step overwrites the parameters with
    their rounded masters: call `take_over` for parameters that were set by hand.
    """

    def __init__(self, copies: Mapping[Tensor, nn.Parameter] | None = None) -> None:
        copies = {} if copies is None else copies
        if not isinstance(copies, Mapping) or not all(isinstance(each, Tensor) for each in (*copies, *copies.values())):
            refuse("Masters: copies", copies, "a dict from parameters to their float32 copies")
        self.copies = dict(copies)

    def of(self, parameter: Tensor) -> Tensor:
        """The master of a parameter: its float32 copy, or the parameter itself."""
        return self.copies.get(parameter, parameter)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for an optimizer that would step parameters instead of their masters."""
        if any(p in self.copies for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer steps the low-precision parameters themselves: build it on what it is given, which are "
                "their float32 masters, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )

    def collect(self) -> None:
        """Add the parameters' gradients to the masters' gradients, and set the parameters' to None."""
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
        """Call `inner`, which steps the masters, then round the masters into the parameters, in place."""
        self.collect()
        inner()
        if self.copies:
            with torch.no_grad():
                for parameter, master in self.copies.items():
                    parameter.copy_(master)

    @torch.no_grad()
    def take_over(self) -> None:
        """Give masters the entries of their parameters that are not their own, rounded: those set by hand."""
        for parameter, master in self.copies.items():
            theirs = parameter != master.to(parameter.dtype)
            if bool(theirs.any()):
                master.copy_(torch.where(theirs, parameter.to(master.dtype), master))

    @torch.no_grad()
    def follow(self) -> None:
        """Round the masters into the parameters after a change outside `step`; graphs in flight stay valid."""
        for parameter, master in self.copies.items():
            parameter.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The masters, in the order of the parameters."""
        return {"masters": [master.detach() for master in self.copies.values()]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if its shapes are not those of the masters."""
        shapes = [tuple(saved.shape) for saved in state["masters"]]
        expected = [tuple(master.shape) for master in self.copies.values()]
        if shapes != expected:
            raise ValueError(f"masters of shapes {shapes}, expected {expected}")
        for master, saved in zip(self.copies.values(), state["masters"], strict=True):
            master.copy_(saved)
