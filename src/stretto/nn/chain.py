"""Stages in a row as one module: plain PyTorch, for evaluation and for use after training."""

from typing import Any

from torch import nn


class Chain(nn.Sequential):
    """An nn.Sequential whose members may return tuples: the next one gets them as arguments."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the stages in order; what is `named` is the first one's."""
        output: Any = inputs if len(inputs) != 1 else inputs[0]
        for stage in self:
            output = stage(*output, **named) if isinstance(output, tuple) else stage(output, **named)
            named = {}
        return output
