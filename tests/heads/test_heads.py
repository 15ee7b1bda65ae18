"""Auxiliary heads: shapes, the choice by dimensions, and what is refused."""

import pytest
import torch
from torch import nn

from stretto.errors import UsageError
from stretto.heads import HEADS, build


def tensors(*shapes, dtype=torch.float32):
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


CASES = [  # kind, what the stage gives, what the model gives, also what auto takes
    ("linear", (4, 7), (4, 3), True),
    ("pooled", (4, 5, 6, 6), (4, 3), True),
    ("pooled", (4, 5, 2, 3, 4), (4, 3), True),
    ("pooled", (4, 5, 6), (4, 3), False),
    ("sequence", (4, 5, 6), (4, 3), False),
    ("language", (4, 5, 6), (4, 5, 11), True),
    ("two-layer", (4, 7), (4, 3), False),
    ("two-layer", (4, 5, 6, 6), (4, 3), False),
    ("two-layer(width=9)", (4, 5, 6), (4, 5, 11), False),
]
OF_NETWORKS = {"auglocal", "blocks", "infopro", "man", "segprop", "solo"}  # with tests of their own


@pytest.mark.parametrize(("kind", "given", "output", "alone"), CASES)
def test_a_head_gives_what_the_model_gives(kind, given, output, alone):
    for name in [kind, "auto"] if alone else [kind]:
        head = build(name, 0, tensors(given), *tensors(output))
        assert head(torch.randn(given)).shape == output
        other = (given[0] + 2, *given[1:])
        assert head(torch.randn(other)).shape == (given[0] + 2, *output[1:])


def test_every_kind_is_tested():
    assert {case[0].partition("(")[0] for case in CASES} | OF_NETWORKS == set(HEADS)


def test_auto_is_the_kind_itself():
    for kind, given, output, alone in CASES:
        if alone:
            chosen, named = (build(name, 0, tensors(given), *tensors(output)) for name in ("auto", kind))
            assert str(chosen) == str(named)


def test_what_a_head_computes():
    x = torch.randn(4, 5, 3, 2)
    pooled = build("pooled", 0, (x,), *tensors((4, 3)))
    assert torch.allclose(pooled(x), pooled[1](x.mean((2, 3))))
    x = torch.randn(4, 5, 6)
    sequence = build("sequence", 0, (x,), *tensors((4, 3)))
    norm, linear = sequence[1], sequence[2]
    assert isinstance(norm, nn.LayerNorm)
    assert torch.allclose(sequence(x), linear(norm(x.mean(1))))
    language = build("language", 0, (x,), *tensors((4, 5, 11)))
    assert torch.allclose(language(x), language[0](x) @ language[1].weight.T)
    assert language[1].bias is None


def test_of_several_tensors_the_first_is_read():
    given = tensors((4, 7), (4, 9, 9))
    head = build("auto", 0, given, *tensors((4, 3)))
    x, other = torch.randn(4, 7), torch.randn(4, 9, 9)
    assert head(x, other).shape == (4, 3)
    assert torch.equal(head(x, other), head(x, torch.zeros(())))


@pytest.mark.parametrize(("name", "given", "output", "parts"), [
    ("auto", (4, 5, 6), (4, 3),
     ["stage 2 gives [4, 5, 6], the model gives [4, 3]", "head=pooled", "head=sequence"]),
    ("auto", (4, 5, 6, 6), (4, 3, 6, 6), ["none of the built-in heads fits", "heads=[module or None"]),
    ("auto", (4,), (4, 3), ["none of the built-in heads fits"]),
    ("linear", (4, 5, 6), (4, 3), ["head 'linear' goes [N, d] -> [N, K]", "stage 2 gives [4, 5, 6]"]),
    ("language", (4, 5, 6), (4, 3), ["head 'language' goes [N, T, d] -> [N, T, V]", "the model gives [4, 3]"]),
    ("pooled", (4, 5), (4, 3), ["head 'pooled' goes [N, C, ...] -> [N, K]"]),
    ("linaer", (4, 5), (4, 3), ["unknown head 'linaer': did you mean 'linear'? Choose from auglocal, auto, blocks"]),
    ("two-layer(width=0)", (4, 5), (4, 3), ["head 'two-layer': width=0 must be a whole number of at least 1"]),
    ("two-layer(widht=8)", (4, 5), (4, 3), ["head 'two-layer' has no option 'widht'; did you mean 'width'?"]),
    ("linear(width=8)", (4, 5), (4, 3), ["head 'linear' has no option 'width'"]),
    ("two-layer", (4, 5), (4, 3, 2), ["head 'two-layer' goes", "the model gives [4, 3, 2]"]),
    ("two-layer(8)", (4, 5), (4, 3), ["cannot read the head 'two-layer(8)'"]),
])  # fmt: skip
def test_refusals_give_both_shapes_and_the_way_out(name, given, output, parts):
    with pytest.raises(UsageError) as error:
        build(name, 2, tensors(given), *tensors(output))
    for part in parts:
        assert part in str(error.value)


def test_where_several_fit_the_message_says_how_to_name_one():
    with pytest.raises(UsageError, match=r"as in 'greedy\(head=\.\.\.\)': head=pooled .* or head=sequence "):
        build("auto", 0, tensors((2, 5, 4)), *tensors((2, 3)))


def test_whole_numbers_have_no_head():
    with pytest.raises(UsageError, match="cannot choose a head"):
        build("auto", 0, tensors((4, 5), dtype=torch.int64), *tensors((4, 3)))
