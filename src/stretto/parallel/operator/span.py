"""What cut pairs of layers take and give: whole activations, or this process's part of the sequence.

The second is sequence parallelism (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4.2): what stands between the pairs, norms, dropouts and residuals, is computed and kept once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.exchange import enter, gather, join, leave, part, spread


@dataclass(frozen=True, eq=False)
class Whole:
    """The same whole activations on every process."""

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        """About to meet weights that this process alone has."""
        return enter(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """A part of a sum, as the sum."""
        return leave(x, self.axis)

    def used(self, parameter: Tensor) -> Tensor:
        """A whole parameter, about to be used: on whole activations its gradient is whole."""
        return parameter


@dataclass(eq=False)
class Span:
    """Activations [N, T, D] (or [T, N, D], or [T, D]) cut along T, as torch.tensor_split cuts.

    `sizes` are those of the forward that runs; who cuts the whole sets them. `running`: the blocks that share this span
    are run in turn right now, and pass parts on. `inside`: a pair has been entered and not left yet.
    """

    axis: Axis
    batch_first: bool = True
    sizes: tuple[int, ...] = ()
    running: bool = False
    inside: bool = False

    def dim(self, x: Tensor) -> int:
        """Where T is."""
        return x.ndim - 2 if self.batch_first or x.ndim == 2 else 0

    def cut(self, x: Tensor) -> Tensor:
        """The own part of what every process has whole."""
        self.sizes = self.axis.cuts(x.size(self.dim(x)))
        self.inside = False
        return part(x, self.axis, self.dim(x), self.sizes)

    def whole(self, x: Tensor) -> Tensor:
        """All parts together, for what takes the whole on every process alike."""
        return join(x, self.axis, self.dim(x), self.sizes)

    def enter(self, x: Tensor) -> Tensor:
        """All parts together, about to meet weights that this process alone has; once for all columns of a pair."""
        if self.inside:
            return x
        self.inside = True
        return gather(x, self.axis, self.dim(x), self.sizes)

    def leave(self, x: Tensor) -> Tensor:
        """A part of a sum, as the own part of the sequence of the sum."""
        assert self.inside
        self.inside = False
        return spread(x, self.axis, self.dim(x), self.sizes)

    def used(self, parameter: Tensor) -> Tensor:
        """A whole parameter, about to be used: on parts of the sequence its gradient is a sum."""
        return enter(parameter, self.axis) if parameter.requires_grad and torch.is_grad_enabled() else parameter


Between = Whole | Span
