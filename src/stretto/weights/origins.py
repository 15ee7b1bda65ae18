"""What each tensor of a forward was computed from: the weights, the input, or neither."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Origin(IntEnum):
    """What a tensor was computed from; the higher wins."""

    CONSTANT = 0
    ZEROS = 1  # as the first state of a recurrence: a product with a weight is an activation
    WEIGHT = 2
    COPY = 3  # computed from weights and constants
    INPUT = 4


@dataclass
class Copy:
    """A tensor computed from weights: by which operation, in which submodule."""

    operation: str
    module: str
    dtype: torch.dtype


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
MAKES_ZEROS = ("zeros", "zeros_like", "new_zeros")
KEEPS_ZEROS = ("clone", "zero_")


@dataclass
class Origins:
    """What each storage was computed from. A storage given back and used anew is judged anew when it is written."""

    kinds: dict[int, Origin] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Origin:
        """What a tensor was computed from."""
        return self.kinds.get(place(tensor), Origin.CONSTANT)

    def record(self, operation: str, given: list[Tensor], made: list[Tensor], module: str) -> None:
        """An operation has been run."""
        kinds = [self.of(tensor) for tensor in given]
        places = {place(tensor) for tensor in given}
        highest = max(kinds, default=Origin.CONSTANT)
        if operation in MAKES_ZEROS and highest == Origin.CONSTANT:
            highest = Origin.ZEROS
        elif operation in PRODUCTS and Origin.ZEROS in kinds:
            highest = Origin.INPUT
        elif highest == Origin.WEIGHT:
            highest = Origin.COPY
        for index, tensor in enumerate(made):
            where = place(tensor)
            kept = where in places or operation in (*MAKES_ZEROS, *KEEPS_ZEROS)
            kind = Origin.CONSTANT if highest == Origin.ZEROS and not kept else highest
            if operation == "_cudnn_rnn" and index == 4:  # the buffer into which it packs weights of separate storage
                kind = Origin.COPY
            if self.kinds.get(where) != Origin.WEIGHT and where:
                self.kinds[where] = kind
                if kind == Origin.COPY and not (where in places and where in self.copies):
                    self.copies[where] = Copy(operation, module, tensor.dtype)


def place(tensor: Tensor) -> int:
    """Where a tensor's storage lies: the same for all its views; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
