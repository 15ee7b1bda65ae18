"""Parts are those of torch.tensor_split."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedule.even_split import bounds, part_sizes


@given(st.integers(0, 40), st.integers(1, 12))
def test_they_are_those_of_torch(length, parts):
    wanted = [part.tolist() for part in torch.arange(length).tensor_split(parts)]
    assert [list(range(*bounds(length, index, parts))) for index in range(parts)] == wanted
    assert list(part_sizes(length, parts)) == [len(part) for part in wanted]
