"""Networks without data: as many parameters as published, the bytes that Korthikanti et al. 2022 count, and numbers."""

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pairwise import slow_where
from stretto.errors import UsageError
from stretto.measure import layer_costs
from stretto.measure.tensor_costs import published_tensor_costs, tensor_costs
from stretto.measure.traced_layers import alike
from stretto.models.core_attention import CoreAttention, Dropout, FusedAttention
from stretto.models.published import (
    FAMILIES,
    PUBLISHED,
    decoder,
    encoder,
    family_member,
    is_planned_only,
    planned_network,
    resnet,
    shape_options,
    unet,
    vgg,
    vit,
)
from stretto.models.residual_block import ResidualBlock, ResidualSum, RMSNorm, rotary
from stretto.models.transformer import rotated
from stretto.nn.chain import Chain

TABLE_3 = partial(decoder, context=2048, vocabulary=51200)  # Korthikanti et al. 2022
LLAMA_2 = partial(
    decoder, context=4096, vocabulary=32000, positions="rotary", norm="rms", gated=True, bias=False,
    attention="fused", dropout=0.0,
)  # fmt: skip
PARAMETERS = {
    "22B": (partial(TABLE_3, depth=48, width=6144, heads=64), 22e9),
    "175B": (partial(TABLE_3, depth=96, width=12288, heads=96), 175e9),
    "530B": (partial(TABLE_3, depth=105, width=20480, heads=128), 530e9),
    "GPT-2": (partial(decoder, tied=True), 124_439_808),  # Hugging Face's gpt2
    "Llama 2 7B": (partial(LLAMA_2, depth=32, width=4096, heads=32, hidden=11008), 6_738_415_616),  # its checkpoints
    "Llama 2 70B": (
        partial(LLAMA_2, depth=80, width=8192, heads=64, kv_heads=8, hidden=28672), 68_976_648_192),
    "BERT-base": (partial(encoder, tied=True), 110e6),  # Devlin et al. 2019
    "BERT-large": (partial(encoder, depth=24, width=1024, heads=16, tied=True), 340e6),
    "ViT-B/16": (vit, 86_567_656),  # torchvision's num_params, as of ResNets and VGG
    "ViT-L/16": (partial(vit, depth=24, width=1024, heads=16), 304_326_632),
    "ResNet-50": (resnet, 25_557_032),
    "Wide ResNet-50-2": (partial(resnet, width=2), 68_883_240),
    "Wide ResNet-18, 2": (partial(resnet, depth=18, width=2), 45.6e6),  # Zagoruyko and Komodakis 2016, table 7
    "VGG-16": (vgg, 138_357_544),
    "U-Net": (unet, 31.0e6),
}  # fmt: skip


LARGER = ("22B", "175B", "530B", "BERT-large", "ViT-L/16")  # of a family with a smaller member


def on_meta(network, dtype=torch.float32, examples=2):
    with torch.device("meta"):
        layers = [layer.to(dtype) for layer in network.layers()]
        x = network.example(examples)
        return layers, x.to(dtype) if x.is_floating_point() else x, network.target(examples)


@pytest.mark.parametrize("name", slow_where(LARGER.__contains__, PARAMETERS))
def test_networks_have_the_published_number_of_parameters(name):
    make, published = PARAMETERS[name]
    layers, _, _ = on_meta(make())
    number = sum({id(p): p.numel() for layer in layers for p in layer.parameters()}.values())
    assert number == (published if isinstance(published, int) else pytest.approx(published, rel=0.02))


T, H, A = 64, 128, 4  # tokens, width, heads


def small(**options):
    return decoder(**{"depth": 1, "width": H, "heads": A, "context": T, "vocabulary": 96} | options)


@lru_cache
def counted(**options):
    network = small(**options)
    layers, x, y = on_meta(network, torch.bfloat16)
    return network, layers, (x, y), layer_costs(layers, x, loss=network.loss, target=y)


def test_a_block_keeps_what_the_paper_counts():
    """s b h (34 + 5 a s / h) bytes, equation 1; torch keeps two numbers of each token beside each of two norms."""
    costs = counted()[-1]
    start, block, *_, end, loss = costs.layers
    statistics = 2 * 2 * 2 * T
    assert block.activation.each == T * H * (34 + 5 * A * T / H) + statistics
    assert start.activation.each == T * H + 8 * T  # the dropout's mask, and the tokens
    assert end.activation.each == 2 * 2 * T * H + statistics / 2  # inputs of the norm and of the output layer
    assert loss.activation.each == pytest.approx(4 * T * 96, rel=0.05)  # logits in float32; and the targets


def block_costs(**options):
    """Of a block by itself."""
    layers, x, _ = on_meta(small(**options), torch.bfloat16)
    return layer_costs([nn.Identity(), layers[1]], x.new_empty((*x.shape, H), dtype=torch.bfloat16)).layers[1]


def test_a_block_of_fused_attention_keeps_a_sum_of_each_row_of_scores():
    """Instead of the scores; torch keeps their logarithms."""
    statistics, log_sums = 2 * 2 * 2 * T, 4 * A * T
    assert block_costs(attention="fused").activation.each == 34 * T * H + statistics + log_sums


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "gated": True, "norm": "rms", "positions": "rotary"}])
def test_flops_are_those_of_the_products(options):
    costs = counted(**options)[-1]
    keys, hidden = options.get("kv_heads", A) / A, 4 * H * (1.5 if options else 1)
    products = 2 * T * H * H * (2 + 2 * keys) + 4 * T * H * hidden + 4 * T * T * H
    assert costs.layers[1].flops().each == products
    assert costs.layers[1].flops("B").each == 2 * products
    assert costs.layers[-2].flops().each == 2 * T * H * 96


def test_a_process_keeps_what_the_paper_counts():
    """s b h (10 + 24 / t + 5 a s / (h t)) bytes, equation 2, with 2 sums over processes in each pass of a block."""
    (network, layers, inputs, whole), parts = counted(), 4
    part = published_tensor_costs(network, layers, inputs, parts, whole)
    *_, block, end, loss = part.layers
    assert block.activation.each == T * H * (10 + 24 / parts + 5 * A * T / H / parts) + 8 * T
    assert [(w.operator, w.calls, w.bytes.each) for w in block.forward_exchanges] == [("tensor-sum", 2, 4 * T * H)]
    assert block.backward_exchanges == block.forward_exchanges
    assert block.flops().each == whole.layers[1].flops().each / parts
    assert (end.output.each, loss.activation.each) == (2 * T * 96 / parts, pytest.approx(4 * T * 96 / parts, rel=0.1))
    assert [row.name for row in part.layers] == [row.name for row in whole.layers]


@pytest.mark.slow
def test_of_blocks_that_are_alike_one_is_cut():
    network, layers, inputs, whole = counted(depth=2)
    assert alike(layers[1]) == alike(layers[2])
    plan = {"0.embedding.token": "vocabulary", "3.score": "column-sliced"}
    each = tensor_costs(layers, inputs[0], 2, plan=plan, in_place=True)
    assert published_tensor_costs(network, layers, inputs, 2, whole).layers[:-1] == each.layers


@pytest.mark.slow
def test_tied_weights_count_once_and_are_cut():
    network, layers, inputs, whole = counted(depth=1, tied=True, attention="fused")
    assert whole.parameters == sum(row.parameters for row in whole.layers) - 96 * H
    part = published_tensor_costs(network, layers, inputs, 2, whole)
    assert (whole.ties[0].layers, whole.ties[0].bytes) == ((0, 2), 2 * 96 * H)
    assert (part.ties[0].layers, part.ties[0].bytes) == ((0, 2), 96 * H)
    assert part.layers[2].parameters == 48 * H + 2 * H


def test_the_core_is_torchs_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    for causal in (True, False):
        wanted = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        for core in (CoreAttention(9, causal=causal), FusedAttention(causal=causal)):
            assert torch.allclose(core(query, key, value), wanted.transpose(1, 2).flatten(2), atol=1e-6)


def test_fused_operators_are_those_of_torch():
    torch.manual_seed(0)
    x, weights = torch.randn(3, 4, 6, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    own, theirs = RMSNorm(8).double(), nn.RMSNorm(8, eps=1e-5).double()
    for norm in (own, theirs):
        nn.init.constant_(norm.weight, 1)
        norm.weight.data *= weights
    for one, other, parameters in (
        (own, theirs, (own.weight, theirs.weight)), (lambda x: rotary(x, 1.0), rotated, (None, None))
    ):  # fmt: skip
        results = []
        for call, weight in zip((one, other), parameters, strict=True):
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            wanted = [leaf] if weight is None else [leaf, weight]
            results.append([out, *torch.autograd.grad(out, wanted, x.flip(0))])
        for mine, torchs in zip(*results, strict=True):
            assert torch.allclose(mine, torchs)


def test_a_residual_sum_drops_its_branch_out():
    torch.manual_seed(0)
    total = ResidualSum(8, dropout=0.25, bias=True)
    nn.init.normal_(total.bias)
    residual, branch, gradient = torch.randn(3, 2, 50, 8).unbind(0)
    leaves = [residual.requires_grad_(), branch.requires_grad_(), total.bias]
    out = total(residual, branch)
    scale = (out - residual != 0) / 0.75
    assert 0.15 < (scale == 0).float().mean() < 0.35
    assert torch.allclose(out, residual + scale * (branch + total.bias), atol=1e-6)
    found = torch.autograd.grad(out, leaves, gradient)
    wanted = (gradient, gradient * scale, (gradient * scale).sum((0, 1)))
    assert all(map(partial(torch.allclose, atol=1e-5), found, wanted))
    total.eval()
    assert torch.equal(total(residual, branch), residual + (branch + total.bias))
    x = torch.ones(4)
    assert Dropout(0.5).eval()(x) is x


def test_networks_compute():
    torch.manual_seed(0)
    for network in (
        small(), small(kv_heads=1, gated=True, norm="rms", positions="rotary", tied=True),
        encoder(depth=1, width=16, heads=2, context=8, vocabulary=20),
        vit(depth=1, width=16, heads=2, side=32, classes=5), unet(depth=1, width=4, side=8), resnet(depth=18, side=32),
    ):  # fmt: skip
        layers, x = Chain(*network.layers()), network.example(2)
        x = torch.randn_like(x) if x.is_floating_point() else x
        network.loss(layers(x), network.target(2)).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layers.parameters())


MISTAKES = [
    ("decoder", {"dept": 3}, "planned without data, has no option 'dept'; did you mean 'depth'"),
    ("decoder", {"depth": 0}, "depth=0 must be a whole number of at least 1"),
    ("decoder", {"width": "64"}, "width='64' must be a whole number"),
    ("decoder", {"width": 100, "heads": 8}, "heads=8 does not divide width=100; take heads=10, or width=104"),
    ("decoder", {"heads": 8, "width": 64, "kv_heads": 3}, "kv_heads=3 does not divide heads=8; take kv_heads=2"),
    ("decoder", {"attention": "flash"}, "attention='flash'; choose from fused, fused-2022, scaled-scores, scores"),
    ("decoder", {"dropout": 1.0}, "dropout=1.0: give a number from 0 up to, but not including, 1"),
    ("decoder", {"tied": "yes"}, "tied='yes'; choose from False, True"),
    ("decoder", {"width": 6, "heads": 2, "positions": "rotary"}, "leaves each head 3; take width=8"),
    ("encoder", {"vocabulary": 0}, "model 'encoder': vocabulary=0 must be"),
    ("vit", {"patch": 15}, "patch=15 does not divide side=224; take side=225"),
    ("resnet", {"depth": 51, "side": 64}, "depth=51; choose 18, 34, 50, 101, 152"),
    ("resnet", {"side": 16}, "side=16 must be a whole number of at least 32"),
    ("unet", {"side": 100}, "depth=4 halves images 4 times, and side=100; take side=112"),
    ("gpt3-175b", {"depth": 3}, "is as published and takes none; other sizes have decoder"),
]


@pytest.mark.parametrize(("name", "options", "message"), MISTAKES)
def test_mistakes(name, options, message):
    with pytest.raises(UsageError) as error:
        planned_network(name, options)
    assert message in str(error.value)


def test_a_name_with_and_without_data():
    assert not is_planned_only("resnet", {"depth": 18, "norm": "group"})
    assert is_planned_only("resnet", {"depth": 18, "side": 64})
    assert not is_planned_only("mlp", {})
    assert all(is_planned_only(name, {}) for name in ("decoder", *PUBLISHED))
    assert shape_options("vgg") == ("side", "classes", "convolutional")
    with pytest.raises(
        UsageError,
        match=r"has no option 'sid'; did you mean 'side'.* side and classes and convolutional give the shape",
    ):
        is_planned_only("vgg", {"sid": 64})


def test_options_are_remembered_as_they_count():
    made = family_member("decoder", {"depth": 2})
    assert (made.options["depth"], made.options["dropout"]) == (2, 0.1)
    assert "kv_heads" not in made.options
    assert set(FAMILIES) == {"decoder", "encoder", "vit", "resnet", "vgg", "alexnet", "unet"}


def test_published_sizes_are_members_of_families():
    assert replace(PUBLISHED["resnet152-4096"](), recipe=[]).example(1).shape == (1, 3, 4096, 4096)
    assert ResidualBlock in {type(layer) for layer in on_meta(decoder(depth=1))[0]}
