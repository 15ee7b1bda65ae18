"""Attentions whose heads of queries share keys and values are recognised, whatever the numbers of heads."""

import pytest
import torch
from torch import nn

from stretto.models.published import decoder
from stretto.parallel.operator.heads import attentions


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_a_head_is_as_wide_as_its_module_says(kv_heads):
    network = decoder(depth=1, width=64, heads=8, context=4, vocabulary=11, kv_heads=kv_heads)
    root = nn.Sequential(*network.layers())
    [found] = attentions(root)
    assert (found.head_width, found.group) == (8, 8 // kv_heads)
    assert root.get_submodule(found.query).weight.shape[0] == kv_heads * (8 // kv_heads + 2) * 8
    assert torch.is_floating_point(root.get_submodule(found.output).weight)
