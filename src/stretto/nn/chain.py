"""Consecutive stages as one plain PyTorch module, for evaluation and for use after training."""

from typing import Any

from torch import nn


class Chain(nn.Sequential):
    """An nn.Sequential whose members may return tuples: the next member takes a tuple as its arguments."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the stages in order; keyword arguments (`named`) go to the first stage."""
        output: Any = inputs if len(inputs) != 1 else inputs[0]
        for stage in self:
            output = stage(*output, **named) if isinstance(output, tuple) else stage(output, **named)
            named = {}
        return output
