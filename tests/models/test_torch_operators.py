"""Attention, norms, positions and gates as libraries write them: equal to torch's own, and to those of one kernel."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stretto.models.core_attention import CoreAttention
from stretto.models.eager_operators import WideCoreAttention
from stretto.models.families import block_shape, family_member
from stretto.models.fused_operators import rotary
from stretto.models.residual_block import HEADS, ApartGatedPerceptron, GatedPerceptron
from stretto.models.torch_operators import Float32RMSNorm, PlainRMSNorm, turned

SHAPE = block_shape("vit", depth=1, width=12, heads=3, context=7, attention="scores", dropout=0.0, causal=False)


@pytest.fixture(autouse=True)
def _in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("attention", ["scores", "fused", "fused-2022"])
@pytest.mark.parametrize("heads_by", ["timm", "torch"])
def test_attention_is_that_of_torch(heads_by, attention):
    reference = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.init.normal_(reference.in_proj_bias)
    ours, x = HEADS[heads_by](replace(SHAPE, attention=attention)), torch.randn(2, 7, 12)
    with torch.no_grad():
        ours.qkv.weight.copy_(reference.in_proj_weight)
        ours.qkv.bias.copy_(reference.in_proj_bias)
        ours.output.weight.copy_(reference.out_proj.weight)
    given = [x.clone().requires_grad_() for _ in range(2)]
    out = ours(given[0])
    wanted = reference(given[1], given[1], given[1], need_weights=False)[0]
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, [given[0], ours.qkv.weight], gradient)
    expected = torch.autograd.grad(wanted, [given[1], reference.in_proj_weight], gradient)
    for one, other in ((out, wanted), *zip(found, expected, strict=True)):
        assert torch.allclose(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", [PlainRMSNorm, Float32RMSNorm])
def test_norms_are_that_of_torch(kind):
    ours, reference, x = kind(6, 1e-6), nn.RMSNorm(6, 1e-6), torch.randn(3, 4, 6)
    with torch.no_grad():
        ours.weight.copy_(reference.weight.normal_())
    assert torch.allclose(ours(x), reference(x), atol=1e-6)  # both cast to float32 on the way


def test_positions_are_those_of_one_kernel():
    x = torch.randn(2, 3, 5, 8).transpose(1, 2)
    assert torch.allclose(turned(x), rotary(x, 1.0), atol=1e-6)  # angles in float32


def test_gates_apart_are_those_of_one_layer():
    shape = replace(SHAPE, gated=True, bias=False, hidden=10)
    joined, apart, x = GatedPerceptron(shape), ApartGatedPerceptron(shape), torch.randn(2, 7, 12)
    with torch.no_grad():
        apart.gate.weight.copy_(joined.gates.weight[0::2])
        apart.gated.weight.copy_(joined.gates.weight[1::2])
        apart.narrow.weight.copy_(joined.narrow.weight)
    assert torch.allclose(apart(x), joined(x), atol=1e-12)


def test_a_softmax_in_float32_is_the_same():
    query, key, value = torch.randn(3, 2, 3, 7, 4)
    one, other = (kind(7, causal=True)(query, key, value) for kind in (WideCoreAttention, CoreAttention))
    assert torch.allclose(one, other, atol=1e-6)


def test_tokens_of_a_class():
    for count in (1, 8):
        network = family_member("vit", {"depth": 1, "width": 12, "heads": 3, "side": 32, "class_tokens": count})
        start = network.layers()[0]
        assert start(torch.randn(2, 3, 32, 32)).shape == (2, 4 + count, 12)
