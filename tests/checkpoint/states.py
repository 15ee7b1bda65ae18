"""Nested states of every kind that a stage may have, and what it means that two are the same."""

import math
import struct
from collections import Counter, OrderedDict

import torch
from hypothesis import strategies as st

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
          torch.int64, torch.uint8, torch.uint16, torch.bool]  # fmt: skip


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    length = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=length, max_size=length))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    tensor = torch.tensor(list(content), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


keys = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.binary(max_size=6)
    | st.sampled_from(DTYPES) | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    | st.sets(st.integers(), max_size=3) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter)
    | tensors()
)  # fmt: skip


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        ),
        max_leaves=12,
    )


states = st.dictionaries(st.text(max_size=5), nested(leaves), max_size=5)


def assert_same(found, wanted):
    """Equal to the bit, of equal types; keys in the same order."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted)]
        assert torch.equal(*as_bytes)
    elif isinstance(wanted, float):
        if wanted == wanted:  # every nan is one
            assert struct.pack("d", found) == struct.pack("d", wanted)
        else:
            assert found != found
    elif isinstance(wanted, dict):
        assert_same(list(found), list(wanted))
        assert_same(list(found.values()), list(wanted.values()))
        if hasattr(wanted, "_metadata"):
            assert_same(found._metadata, wanted._metadata)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted
