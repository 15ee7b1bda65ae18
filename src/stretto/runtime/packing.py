"""Values as bytes: what they are made of as a row of whole numbers, their numbers in one flat buffer.

A value is None, a tensor, a tuple of values, or a dict of values by whole numbers: all that an action makes. Its
*layout* is sent once and again when it changes; the bytes alone are sent every time.

    layout    None -> 0      tensor -> 1, dtype, dimensions, sizes..., strides...
              tuple -> 2, length, members...      dict -> 3, length, key, member, ...

Tensors keep their strides where they are dense (a transposed one, channels_last): the operations that follow then
compute on the same memory format as without processes, to the same last bit. Others become contiguous.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

Layout = tuple[int, ...]

NOTHING, TENSOR, TUPLE, DICT = range(4)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
ALIGNMENT = 64  # bytes


def layout_of(value: Any) -> Layout:
    """What a value is made of. Raises TypeError for anything that is not listed above."""
    numbers: list[int] = []
    _describe(value, numbers)
    return tuple(numbers)


def _describe(value: Any, numbers: list[int]) -> None:
    if value is None:
        numbers.append(NOTHING)
    elif isinstance(value, Tensor):
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
    """The strides of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@lru_cache(maxsize=1024)
def size_of(layout: Layout) -> int:
    """How many bytes a value of this layout takes."""
    return sum(aligned(prod(shape) * DTYPES[code].itemsize) for code, shape, _ in _tensors(layout))


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(value: Any, buffer: Tensor) -> None:
    """Write a value's bytes into a buffer [size_of(layout_of(value))] of uint8."""
    fill(places_in(layout_of(value), buffer), value)


def places_in(layout: Layout, buffer: Tensor) -> list[Tensor]:
    """Where in a buffer the tensors of a value of this layout go."""
    return list(leaves_of(unpack(layout, buffer)))


def fill(places: Sequence[Tensor], value: Any) -> None:
    """Copy a value's tensors to their places."""
    for place, tensor in zip(places, leaves_of(value), strict=True):
        place.copy_(tensor.detach())


def unpack(layout: Layout, buffer: Tensor) -> Any:
    """The value whose bytes a buffer holds. Its tensors share the buffer's memory."""
    numbers = iter(layout)
    value, _ = _read(numbers, buffer, 0)
    return value


def _read(numbers: Iterator[int], buffer: Tensor, start: int) -> tuple[Any, int]:
    kind = next(numbers)
    if kind == NOTHING:
        return None, start
    if kind == TENSOR:
        dtype, dims = DTYPES[next(numbers)], next(numbers)
        shape, strides = [next(numbers) for _ in range(dims)], [next(numbers) for _ in range(dims)]
        size = prod(shape) * dtype.itemsize
        flat = buffer[start : start + size].view(dtype)
        return flat.as_strided(shape, strides) if size else flat.view(shape), start + aligned(size)
    length = next(numbers)
    members: dict[int, Any] = {}
    for position in range(length):
        key = next(numbers) if kind == DICT else position
        members[key], start = _read(numbers, buffer, start)
    return members if kind == DICT else tuple(members.values()), start


def leaves_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in the order of its layout."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | Mapping):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_of(member)


def _tensors(layout: Layout) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    # The code, shape and strides of each tensor: members stand in a row, so no nesting has to be followed but dicts'.
    numbers = iter(layout)

    def walk() -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        kind = next(numbers)
        if kind == TENSOR:
            code, dims = next(numbers), next(numbers)
            yield code, tuple(next(numbers) for _ in range(dims)), tuple(next(numbers) for _ in range(dims))
        elif kind != NOTHING:
            for _ in range(next(numbers)):
                if kind == DICT:
                    next(numbers)
                yield from walk()

    return walk()


def as_tensor(text: bytes) -> Tensor:
    """Text as a value: [number of bytes] of uint8."""
    return torch.tensor(list(text), dtype=torch.uint8)


def as_text(tensor: Tensor) -> bytes:
    """What `as_tensor` was given."""
    return bytes(tensor.tolist())
