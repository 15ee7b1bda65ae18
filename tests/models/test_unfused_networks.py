"""Programs that fuse other operators: the same numbers as those that do, and what each moves, by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from stretto import UsageError
from stretto.measure.layer_flops import layer_costs
from stretto.models.published import decoder, encoder, megatron_token_loss
from stretto.models.residual_block import EagerGELU, EarlyFusedAttention, attention_2022
from stretto.nn.chain import Chain

SMALL = {"depth": 1, "width": 16, "heads": 2, "context": 8, "vocabulary": 32, "dropout": 0.0}
T, H, V = 256, 64, 4096  # tokens, width, vocabulary


def output_and_gradients(network):
    torch.manual_seed(0)
    chain = Chain(*network.layers()).double()
    for parameter in chain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(32, (2, 8))
    loss = network.loss(chain(tokens), tokens)
    loss.backward()
    return loss, [parameter.grad for parameter in chain.parameters()]


@pytest.mark.parametrize("family", [decoder, encoder])
@pytest.mark.parametrize(
    "options",
    [{"fused": False}, {"attention": "fused-2022"}, {"attention": "scaled-scores"}, {"loss": "megatron"}],
    ids=str,
)
def test_other_kernels_give_the_same_numbers(family, options):
    (loss, gradients), (wanted, others) = (output_and_gradients(family(**SMALL, **each)) for each in (options, {}))
    assert torch.allclose(loss, wanted, rtol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize(("family", "approximate"), [(decoder, "tanh"), (encoder, "none")])
def test_gelu_is_torchs_by_tanh_or_erf(family, approximate):
    x = torch.randn(50, dtype=torch.float64)
    assert torch.allclose(EagerGELU(approximate)(x), nn.GELU(approximate)(x), rtol=1e-12)
    found = [[part for layer in family(**SMALL, fused=fused).layers() for part in layer.modules()
              if isinstance(part, nn.GELU | EagerGELU)] for fused in (True, False)]  # fmt: skip
    assert {part.approximate for parts in found for part in parts} == {approximate}
    assert [{type(part) for part in parts} for parts in found] == [{nn.GELU}, {EagerGELU}]


def test_early_attention_is_torchs_with_grouped_queries_and_gradients():
    torch.manual_seed(0)
    given = [torch.randn(2, heads, 7, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    for causal in (True, False):
        wanted = scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
        mixed = EarlyFusedAttention(causal=causal)(*given)
        assert torch.allclose(mixed, wanted.transpose(1, 2).flatten(2))
        weights = torch.randn_like(wanted)
        gradients = torch.autograd.grad((attention_2022(*given, causal)[0] * weights).sum(), given)
        for one, other in zip(gradients, torch.autograd.grad((wanted * weights).sum(), given), strict=True):
            assert torch.allclose(one, other)


def test_megatrons_loss_is_torchs_and_leaves_the_logits_alone():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 5, 7, requires_grad=True), torch.randint(7, (2, 5))
    before = logits.detach().clone()
    wanted = torch.autograd.grad(3 * cross_entropy(logits.flatten(0, 1), target.flatten()), logits)[0]
    assert torch.allclose(torch.autograd.grad(3 * megatron_token_loss(logits, target), logits)[0], wanted)
    assert torch.equal(logits.detach(), before)


def on_meta(**options):
    network = decoder(depth=1, width=H, heads=2, context=T, vocabulary=V, dropout=0.0, **options)
    with torch.device("meta"):
        return network, [layer.to(torch.bfloat16) for layer in network.layers()]


def of_the_loss(**options):
    network, layers = on_meta(**options)
    with torch.device("meta"):
        return layer_costs(layers, network.example(2), loss=network.loss, target=network.target(2)).layers[-1]


def of_a_block(**options):
    x = torch.empty(2, T, H, dtype=torch.bfloat16, device="meta")
    return layer_costs([nn.Identity(), on_meta(**options)[1][1]], x).layers[1]


def total(works, kind="bytes"):
    return sum(getattr(work, kind).each for work in works)


@pytest.mark.slow
def test_megatrons_loss_reads_and_writes_each_logit_by_hand():
    """Forward: to float32 6 bytes, largest 4, difference 8, exponential 8, sum 4, quotient 8; backward: 8, and 6."""
    row = of_the_loss(fused=False, loss="megatron")
    assert total(row.forward) / (T * V) == pytest.approx(6 + 4 + 8 + 8 + 4 + 8, rel=0.01)
    assert total(row.backward) / (T * V) == pytest.approx(8 + 6, rel=0.01)


def test_unfused_forwards_move_so_many_bytes_more_by_hand():
    """Of T x 3H and T x 4H biases read and written; of GELU by tanh six operators, and two that read two; of T x T
    scores two; of T x H a bias and a sum, twice, where one operator reads two and writes one.
    """
    fused, eager = of_a_block(), of_a_block(fused=False, loss="megatron")
    gelu = 6 * 2 + 2 * 3 - 2
    scores = 2 * T * T * (2 * 2)
    expected = 2 * (2 * (3 + 4) * T * H + gelu * 4 * T * H + scores + 2 * (2 + 3 - 3) * T * H)
    assert total(eager.forward) - total(fused.forward) == pytest.approx(expected, rel=0.02)
    assert total(eager.forward, "flops") == total(fused.forward, "flops")
    assert eager.parameters == fused.parameters


def test_causal_attention_computes_half_of_its_scores_and_a_margin():
    def flops(context, causal):
        row = layer_costs(
            [torch.nn.Identity(), Core(causal)], torch.zeros(2, 2, context, 16, device="meta")
        ).layers[1]  # fmt: skip
        return [total(row.works(kind), "flops") for kind in "FB"]

    for context, share in ((100, 1.0), (2048, 0.5 + 220 / 2048), (16384, 0.5 + 220 / 16384)):
        for part, whole in zip(flops(context, True), flops(context, False), strict=True):
            assert part == pytest.approx(share * whole)


class Core(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, x):
        return scaled_dot_product_attention(x, x, x, is_causal=self.causal)


def test_an_unknown_loss_is_refused():
    with pytest.raises(UsageError, match=r"model 'encoder'.*loss='fused'; choose from megatron, torch"):
        encoder(loss="fused")
