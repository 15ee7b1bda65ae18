"""Weights that a graph saves by name instead of by value, so that a backward can read other values than its forward."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import UsageError


class Read(NamedTuple):
    """Stands in a graph for a weight, or a view of one, that the backward will read: its name, size and strides."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the weight's first one

    def of(self, weight: Tensor) -> Tensor:
        """The same view of another tensor of the weight's size and strides."""
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


class Reads:
    """Recognises weights and their views among the tensors that a graph saves, by storage: they have no `_base`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._ranges: dict[int, list[tuple[int, int, str]]] = {}  # by storage address: first element, end, weight
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        for name, weight in weights.items():
            if weight.numel():
                start, end = storage_range(weight)
                self._ranges.setdefault(weight.untyped_storage().data_ptr(), []).append((start, end, name))
        for ranges in self._ranges.values():
            ranges.sort()
            for (_, end, first), (start, _, second) in pairwise(ranges):
                if start < end:
                    raise UsageError(
                        f"weights {first!r} and {second!r} overlap in memory: give each a tensor of its own"
                    )

    def pack(self, tensor: Tensor) -> Any:
        """A `Read` for a weight or a view of one, any other tensor itself: a pack function of `saved_tensors_hooks`.

        Raises UsageError for a tensor in a weight's storage that is not a view of one weight in its dtype.
        """
        if self._ranges and tensor.layout == torch.strided:
            ranges = self._ranges.get(tensor.untyped_storage().data_ptr())
            if ranges is not None:
                return self._find(tensor, ranges)
        return tensor

    def _find(self, tensor: Tensor, ranges: list[tuple[int, int, str]]) -> Read:
        start, end = storage_range(tensor)
        for weight_start, weight_end, name in ranges:
            same_type = tensor.dtype == self._dtypes[name] and not tensor.is_conj()
            if weight_start <= start and end <= weight_end and same_type:
                return Read(name, tuple(tensor.shape), tensor.stride(), start - weight_start)
        names = ", ".join(repr(name) for _, _, name in ranges)
        raise UsageError(
            f"a backward reads {names} in another shape or dtype, whose values cannot be replaced; {REMEDY}"
        )


REMEDY = "choose a method with weights='stash', such as pb(stash=True) or pipedream"


def storage_range(tensor: Tensor) -> tuple[int, int]:
    """The elements [start, end) of its storage that a tensor spans."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(
        int((size - 1) * step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
