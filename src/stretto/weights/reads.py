"""Weights that a graph saved, kept by name, so that a backward can be handed other values than its forward saw."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import UsageError


class Read(NamedTuple):
    """A weight, or a view of one, that a backward will read: in place of its values, where they are to be found."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the weight's first element

    def of(self, weight: Tensor) -> Tensor:
        """The same view of another tensor of the weight's size and strides."""
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


class Reads:
    """Tells whether a tensor is a weight or a view of one, by its storage: a saved tensor has no `_base`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._places: dict[int, list[tuple[int, int, str]]] = {}
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        for name, weight in weights.items():
            if weight.numel():
                start, end = extent(weight)
                self._places.setdefault(weight.untyped_storage().data_ptr(), []).append((start, end, name))
        for places in self._places.values():
            places.sort()
            for (_, end, one), (start, _, other) in pairwise(places):
                if start < end:
                    raise UsageError(f"weights {one!r} and {other!r} overlap in memory: give each a tensor of its own")

    def pack(self, tensor: Tensor) -> Any:
        """What a graph shall keep in place of a tensor it saves: `Read` for a weight, anything else as it is."""
        if self._places and tensor.layout == torch.strided:
            places = self._places.get(tensor.untyped_storage().data_ptr())
            if places is not None:
                return self._find(tensor, places)
        return tensor

    def _find(self, tensor: Tensor, places: list[tuple[int, int, str]]) -> Any:
        start, end = extent(tensor)
        for first, last, name in places:
            if first <= start and end <= last and tensor.dtype == self._dtypes[name] and not tensor.is_conj():
                return Read(name, tuple(tensor.shape), tensor.stride(), start - first)
        names = ", ".join(repr(name) for _, _, name in places)
        raise UsageError(
            f"a backward reads {names} in another shape or dtype, whose values cannot be replaced; {REMEDY}"
        )


REMEDY = "choose a method with weights='stash', such as pb(stash=True) or pipedream"


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first element of the storage that a tensor uses, and the one past its last."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(
        int((size - 1) * step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
