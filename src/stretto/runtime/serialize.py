"""Values as bytes: what they are made of as a row of whole numbers, their numbers in one flat buffer.

A value is None, a tensor, a tuple of values, or a dict of values by whole numbers: all that an action makes. Its
*layout* is sent once and again when it changes; the bytes alone are sent every time.

    layout    None -> 0      tensor -> 1, dtype, dimensions, sizes..., strides...
              tuple -> 2, length, members...      dict -> 3, length, key, member, ...

Tensors keep their strides where they are dense (a transposed one, channels_last): the operations that follow then
compute on the same memory format as without processes, to the same last bit. Others become contiguous.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import UsageError

Layout = tuple[int, ...]

NOTHING, TENSOR, TUPLE, DICT = range(4)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
ALIGNMENT = 64  # bytes


def layout_of(value: Any) -> Layout:
    """What a value is made of. Raises TypeError for what is not listed above, UsageError for sparse tensors."""
    numbers: list[int] = []
    _describe(value, numbers)
    return tuple(numbers)


def _describe(value: Any, numbers: list[int]) -> None:
    if value is None:
        numbers.append(NOTHING)
    elif isinstance(value, Tensor):
        if value.is_sparse:
            raise UsageError(
                f"a sparse tensor {tuple(value.shape)} cannot be sent between workers: build an embedding whose weight "
                "stages share with sparse=False, or train on one process"
            )
        if value.dtype not in _CODES or value.layout != torch.strided:
            raise TypeError(f"a tensor of {value.dtype}, {value.layout} cannot be sent between workers")
        strides = value.stride() if is_dense(value) else contiguous_strides(value.shape)
        numbers += (TENSOR, _CODES[value.dtype], value.dim(), *value.shape, *strides)
    elif isinstance(value, tuple):
        numbers += (TUPLE, len(value))
        for member in value:
            _describe(member, numbers)
    elif isinstance(value, Mapping):
        numbers += (DICT, len(value))
        for key, member in value.items():
            numbers.append(key)
            _describe(member, numbers)
    else:
        raise TypeError(f"{type(value).__name__} cannot be sent between workers: only tensors, tuples, dicts of them")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each place once, in whatever order of dimensions."""
    return tensor.is_contiguous() or dense(tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=1024)
def dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether sizes and strides, sorted, are those of a contiguous tensor."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def size_of(layout: Layout) -> int:
    return form_of(layout).size


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class TensorPlace(NamedTuple):
    """Where a tensor's bytes begin, counted in its own elements, and how they make a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def within(self, buffer: Tensor, offset: int) -> Tensor:
        """The tensor, on a buffer's memory from the byte `offset` on."""
        flat = buffer.view(self.dtype)
        first = flat.storage_offset() + self.start + offset // self.dtype.itemsize
        return flat.as_strided(self.shape, self.strides, first)


class Form(NamedTuple):
    """A layout that has been read: a value that has places for tensors, and its size in bytes."""

    value: Any
    size: int

    def within(self, buffer: Tensor, offset: int = 0) -> Any:
        """The value whose bytes a buffer holds, from the byte `offset` on. Its tensors share the buffer's memory."""
        return _within(self.value, buffer, offset)


def _within(value: Any, buffer: Tensor, offset: int) -> Any:
    if isinstance(value, TensorPlace):
        return value.within(buffer, offset)
    if isinstance(value, dict):
        return {key: _within(member, buffer, offset) for key, member in value.items()}
    return value if value is None else tuple([_within(member, buffer, offset) for member in value])


@lru_cache(maxsize=1024)
def form_of(layout: Layout) -> Form:
    """The form that a layout describes: a value with places for tensors, and its size in bytes."""
    return Form(*_read(iter(layout), 0))


def _read(numbers: Iterator[int], start: int) -> tuple[Any, int]:
    # The next value of a layout, whose bytes begin at `start`, and where those of the one after it begin.
    kind = next(numbers)
    if kind == NOTHING:
        return None, start
    if kind == TENSOR:
        dtype, dims = DTYPES[next(numbers)], next(numbers)
        shape, strides = (tuple([next(numbers) for _ in range(dims)]) for _ in range(2))
        place = TensorPlace(dtype, shape, strides, start // dtype.itemsize)
        return place, start + aligned(prod(shape) * dtype.itemsize)
    length = next(numbers)
    members: dict[int, Any] = {}
    for position in range(length):
        key = next(numbers) if kind == DICT else position
        members[key], start = _read(numbers, start)
    return members if kind == DICT else tuple(members.values()), start


def pack(value: Any, buffer: Tensor) -> None:
    fill(form_of(layout_of(value)).within(buffer), value)


def unpack(layout: Layout, buffer: Tensor) -> Any:
    """The value whose bytes a buffer holds. Its tensors share the buffer's memory."""
    return form_of(layout).within(buffer)


def fill(places: Any, value: Any) -> None:
    """Copy a value's tensors into those of another one of the same layout."""
    for place, tensor in zip(leaves_of(places), leaves_of(value), strict=True):
        place.copy_(tensor.detach())


def leaves_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in the order of its layout."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | Mapping):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_of(member)


def as_tensor(text: bytes) -> Tensor:
    """Text as a value: [number of bytes] of uint8."""
    return torch.tensor(list(text), dtype=torch.uint8)


def as_text(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
