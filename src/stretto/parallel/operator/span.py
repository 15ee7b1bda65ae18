"""What cut pairs of layers take and give: whole activations, or this process's part of the sequence.

The second is sequence parallelism (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4.2): what stands between the pairs, norms, dropouts and residuals, is computed and kept once, and so
is what a pair takes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.columns import Gathered
from stretto.parallel.operator.exchange import enter, join, leave, part, spread


@dataclass(frozen=True, eq=False)
class WholeActivations:
    """The same whole activations on every process."""

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        """About to meet weights that this process alone has."""
        return enter(x, self.axis)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column, on what was entered."""
        return F.linear(x, weight, bias)

    def leave(self, x: Tensor) -> Tensor:
        """A part of a sum, as the sum."""
        return leave(x, self.axis)

    def used(self, parameter: Tensor) -> Tensor:
        """A whole parameter, about to be used: on whole activations its gradient is whole."""
        return parameter


@dataclass(eq=False)
class SequenceParts:
    """Activations [N, T, D] (or [T, N, D], or [T, D]) cut along T, as torch.tensor_split cuts.

    `sizes` are those of the forward that runs; who cuts the whole sets them. `running`: the blocks that share this span
    are run in turn right now, and pass parts on. `inside`: what the pair takes that has been entered and not left yet.
    """

    axis: Axis
    batch_first: bool = True
    sizes: tuple[int, ...] = ()
    running: bool = False
    inside: Gathered | None = None

    def dim(self, x: Tensor) -> int:
        """The dim of the sequence in activations like x."""
        return x.ndim - 2 if self.batch_first or x.ndim == 2 else 0

    def cut(self, x: Tensor) -> Tensor:
        """The own part of what every process has whole."""
        self.sizes = self.axis.cuts(x.size(self.dim(x)))
        self.inside = None
        return part(x, self.axis, self.dim(x), self.sizes)

    def whole(self, x: Tensor) -> Tensor:
        """All parts together, for what takes the whole on every process alike."""
        return join(x, self.axis, self.dim(x), self.sizes)

    def enter(self, x: Tensor) -> Tensor:
        """All parts together, about to meet weights that this process alone has; once for all columns of a pair."""
        if self.inside is not None:
            return x
        self.inside = Gathered(x, self.axis, self.dim(x), self.sizes)
        return self.inside.whole

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column; where it takes the very tensor that was gathered, and autocast casts nothing, that is dropped."""
        if self.inside is None or x is not self.inside.whole or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        return self.inside.linear(weight, bias)

    def leave(self, x: Tensor) -> Tensor:
        """A part of a sum, as the own part of the sequence of the sum."""
        assert self.inside is not None
        self.inside = None
        return spread(x, self.axis, self.dim(x), self.sizes)

    def used(self, parameter: Tensor) -> Tensor:
        """A whole parameter, about to be used: on parts of the sequence its gradient is a sum."""
        return enter(parameter, self.axis) if parameter.requires_grad and torch.is_grad_enabled() else parameter


Between = WholeActivations | SequenceParts
