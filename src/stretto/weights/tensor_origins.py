"""What each tensor of a forward was computed from: the weights, the input, or neither."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Origin(IntEnum):
    """What a tensor was computed from: of several operands, the highest value counts."""

    CONSTANT = 0
    ZEROS = 1  # such as the first state of a recurrence: its product with a weight is an activation
    WEIGHT = 2
    COPY = 3  # computed from weights and constants
    INPUT = 4


@dataclass
class Copy:
    """A tensor computed from weights: the operation, the name of the submodule, and the tensor's dtype."""

    operation: str
    module: str
    dtype: torch.dtype


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
MAKES_ZEROS = ("zeros", "zeros_like", "new_zeros")
KEEPS_ZEROS = ("clone", "zero_")


@dataclass
class Origins:
    """The origin of each storage, by its address. A reused address gets a new origin when it is written."""

    kinds: dict[int, Origin] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Origin:
        """What a tensor was computed from."""
        return self.kinds.get(storage_address(tensor), Origin.CONSTANT)

    def record(self, operation: str, operands: list[Tensor], results: list[Tensor], module: str) -> None:
        """Record the origins of an operation's results; `module` names the submodule that ran it."""
        kinds = [self.of(tensor) for tensor in operands]
        addresses = {storage_address(tensor) for tensor in operands}
        highest = max(kinds, default=Origin.CONSTANT)
        if operation in MAKES_ZEROS and highest == Origin.CONSTANT:
            highest = Origin.ZEROS
        elif operation in PRODUCTS and Origin.ZEROS in kinds:
            highest = Origin.INPUT
        elif highest == Origin.WEIGHT:
            highest = Origin.COPY
        for index, tensor in enumerate(results):
            address = storage_address(tensor)
            still_zeros = address in addresses or operation in (*MAKES_ZEROS, *KEEPS_ZEROS)
            kind = Origin.CONSTANT if highest == Origin.ZEROS and not still_zeros else highest
            if operation == "_cudnn_rnn" and index == 4:  # the buffer into which cuDNN packs weights
                kind = Origin.COPY
            if self.kinds.get(address) != Origin.WEIGHT and address:
                self.kinds[address] = kind
                if kind == Origin.COPY and not (address in addresses and address in self.copies):
                    self.copies[address] = Copy(operation, module, tensor.dtype)


def storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage, the same for all its views; 0 if the tensor is not strided."""
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
