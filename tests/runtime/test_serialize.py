"""Whatever an action makes comes out as it went in: values, types, memory formats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.runtime.serialize import DTYPES, layout_of, leaves_of, pack, size_of, unpack


def through(value):
    layout = layout_of(value)
    buffer = torch.empty(size_of(layout), dtype=torch.uint8)
    pack(value, buffer)
    return unpack(layout, buffer)


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a is None and b is None


def test_a_part_of_a_buffer_is_all_that_is_written():
    value = (torch.arange(5), {1: torch.ones(3)})
    layout = layout_of(value)
    whole = torch.full((64 + size_of(layout) + 64,), 7, dtype=torch.uint8)
    part = whole[64:-64]
    pack(value, part)
    assert same(value, unpack(layout, part))
    assert whole[:64].eq(7).all()
    assert whole[-64:].eq(7).all()


tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)
values = st.recursive(
    st.none() | tensors,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_any_value(value):
    assert same(value, through(value))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).t(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 5, 6).permute(2, 0, 1), torch.randn(7), torch.tensor(2.0), torch.randn(1, 5, 1).transpose(0, 1),
    ],
)  # fmt: skip
def test_dense_tensors_keep_their_strides(tensor):
    (back,) = leaves_of(through((tensor,)))
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("tensor", [torch.randn(6, 6)[::2], torch.randn(1, 3).expand(4, 3), torch.randn(9)[2:5]])
def test_others_become_contiguous(tensor):
    back = through(tensor)
    assert back.is_contiguous()
    assert torch.equal(back, tensor)


def test_two_values_of_one_layout_differ_in_nothing_but_bytes():
    a, b = (torch.randn(2, 3), None, {4: torch.ones(2)}), (torch.randn(2, 3), None, {4: torch.zeros(2)})
    assert layout_of(a) == layout_of(b)
    assert layout_of(a) != layout_of((torch.randn(3, 2), None, {4: torch.ones(2)}))


@pytest.mark.parametrize("value", ["text", [torch.ones(1)], 3, torch.ones(2).to_sparse()])
def test_what_cannot_travel_is_refused(value):
    is_sparse = isinstance(value, torch.Tensor)
    with pytest.raises(UsageError if is_sparse else TypeError, match="cannot be sent between workers"):
        layout_of(value)
