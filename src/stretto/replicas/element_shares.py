"""Which elements of a stage's parameters each replica's optimizer steps.

Where any element may be stepped alone, the parameters are laid end to end and cut into equal shares:

    [5, 1000]   [1000]   [10, 3]
    |----------------|---------|    two replicas
        replica 0     replica 1
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # elements; no kernel works on more of them at once, so that a cut at a multiple changes no bit


class Elements(NamedTuple):
    """Elements [begin, end) of a parameter laid flat, by its number."""

    parameter: int
    begin: int
    end: int


class Shares:
    """The elements of each replica: at most one range of each parameter.

    Shares are of equal size, but for BLOCK, if `elementwise`; else whole parameters are dealt out, each, largest first,
    to the replica that has least. A parameter whose elements do not lie in their order in memory is not cut either.
    """

    def __init__(self, parameters: Sequence[Tensor], replicas: int, *, elementwise: bool) -> None:
        self.parameters = list(parameters)
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        self._sizes = [parameter.numel() for parameter in parameters]
        self._dtype = reduce(torch.promote_types, (parameter.dtype.to_real() for parameter in parameters))
        cut = [elementwise and parameter.is_contiguous() for parameter in parameters]
        self._of: list[list[Elements]] = [[] for _ in range(replicas)]
        self._deal([index for index, each in enumerate(cut) if not each])
        self._cut([index for index, each in enumerate(cut) if each])
        for elements in self._of:
            elements.sort()

    def _deal(self, indices: Sequence[int]) -> None:
        for index in sorted(indices, key=lambda index: -self._sizes[index]):
            self._of[self._emptiest()].append(Elements(index, 0, self._sizes[index]))

    def _emptiest(self) -> int:
        held = [sum(end - begin for _, begin, end in elements) for elements in self._of]
        return held.index(min(held))

    def _cut(self, indices: Sequence[int]) -> None:
        total, replicas, start = sum(self._sizes[index] for index in indices), len(self._of), 0
        for index in indices:
            size = self._sizes[index]
            ends = [total * (replica + 1) / replicas - start for replica in range(replicas)]
            marks = [0, *(min(size, max(0, round(end / BLOCK) * BLOCK)) for end in ends[:-1]), size]
            if size == 0:
                marks = [0] * (replicas + 1)
            for replica, (begin, end) in enumerate(pairwise(marks)):
                if begin < end:
                    self._of[replica].append(Elements(index, begin, end))
            start += size

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self._of)

    def of(self, replica: int) -> list[Elements]:
        """A replica's elements, by parameter."""
        return self._of[replica]

    def is_whole(self, elements: Elements) -> bool:
        """Whether these are all elements of their parameter."""
        return elements.end - elements.begin == self._sizes[elements.parameter]

    def views(self, tensors: Sequence[Tensor], replica: int) -> list[Tensor]:
        """A replica's elements of tensors shaped as the parameters: whole ones, and flat parts of others."""
        return [self.view(tensors[each.parameter], each) for each in self._of[replica]]

    def view(self, tensor: Tensor, elements: Elements) -> Tensor:
        """These elements of a tensor shaped as their parameter: the tensor if they are all, else a flat part."""
        return tensor if self.is_whole(elements) else tensor.view(-1)[elements.begin : elements.end]

    def flat(self, tensors: Sequence[Tensor], replica: int) -> list[Tensor]:
        """As `views`, all of them flat, and in the order of elements; copies where memory has another order."""
        return [tensors[each.parameter].reshape(-1)[each.begin : each.end] for each in self._of[replica]]

    def norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norms of whole gradients, [parameters], as replicas find them of which each has the sum of its share."""
        gradients = [torch.zeros(0) if each.grad is None else each.grad for each in self.parameters]
        rows = [self.row(self.flat(gradients, replica), replica) for replica in range(self.replicas)]
        return self.together(rows, parameters)

    def row(self, gradients: Sequence[Tensor], replica: int) -> Tensor:
        """The norms of a replica's part of each gradient, flat; 0 where it has none, [all parameters]."""
        row = torch.zeros(len(self._sizes), dtype=self._dtype, device=self.parameters[0].device)
        norms = torch._foreach_norm(list(gradients)) if gradients else ()
        for elements, norm in zip(self._of[replica], norms, strict=True):
            row[elements.parameter] = norm
        return row

    def together(self, rows: Iterable[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """The norms of whole gradients, [parameters], from replicas' rows in their order; of a single part its own."""
        norms: Tensor = reduce(torch.hypot, rows)
        return norms[[self._places[parameter] for parameter in parameters]]
