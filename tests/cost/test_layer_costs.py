"""Costs of layers: counted by hand from shapes, alike on fake and on real tensors, and those of published networks."""

import json
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pairwise import slow_where
from stretto import UsageError
from stretto.cost import Affine, ModelCosts
from stretto.measure import faking, layer_costs
from stretto.models.published import PUBLISHED, decoder, published
from stretto.models.transformer import Block
from stretto.nn.flop_counter import counting

ITEM = 4


def mlp():
    return [nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)], torch.randn(6, 5)


def images():
    layers = [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3),
    ]
    return layers, torch.randn(6, 3, 8, 8)


def tokens():
    return [nn.Embedding(11, 16), Block(16, 2, 2), Block(16, 2, 2), nn.Linear(16, 11)], torch.randint(11, (6, 8))


def without_data():
    shape = {"depth": 2, "width": 16, "heads": 4, "kv_heads": 2, "context": 8, "vocabulary": 11}
    return decoder(**shape, norm="rms", positions="rotary", gated=True).layers(), torch.randint(11, (6, 8))


NETWORKS = {"mlp": mlp, "images": images, "tokens": tokens, "without data": without_data}


@cache
def counted_network(name):
    """Its layers, its input and its costs; nobody changes them."""
    layers, x = NETWORKS[name]()
    return layers, x, layer_costs(layers, x)


def test_a_multi_layer_perceptron_by_hand():
    *_, costs = counted_network("mlp")
    first, relu, last = costs.layers
    assert (first.activation, relu.activation, last.activation) == (
        Affine(0, 5 * ITEM), Affine(0, 7 * ITEM), Affine(0, 7 * ITEM)
    )  # fmt: skip
    assert (first.shared, relu.shared, last.shared) == (Affine(), Affine(), Affine(0, 7 * ITEM))
    assert (first.output, last.output) == (Affine(0, 7 * ITEM), Affine(0, 3 * ITEM))
    assert (first.parameters, first.parameter_bytes, first.parameter_tensors) == (42, 42 * ITEM, 2)
    forward = Affine(0, 2 * 7 * 3)
    assert [last.flops(kind) for kind in "FBIW"] == [forward, forward + forward, forward, forward]
    assert [first.flops(kind).each for kind in "FBIW"] == [70, 70, 0, 70]  # its input needs no gradient
    whole = costs.whole
    assert whole.activation == Affine(0, (5 + 7) * ITEM)  # the ReLU's output, which the last layer takes, once
    assert whole.held == Affine(0, (5 + 7 + 3) * ITEM)


def test_convolution_normalisation_and_relu_by_hand():
    *_, costs = counted_network("images")
    first = costs.layers[0]
    image = 8 * 8
    assert first.activation == Affine(2 * 4 * ITEM, (3 + 4 + 4) * image * ITEM)  # mean and deviation of 4 channels
    assert first.flops() == Affine(0, 2 * 4 * 3 * 9 * image)


def test_a_block_of_a_transformer_by_hand():
    d, h, T = 16, 2, 8
    block = counted_network("tokens")[2].layers[1]
    # input, norm, query, key, value, attention, sum, norm, and twice four times as much; means and deviations; log sums
    assert block.activation == Affine(0, (16 * d * T + 4 * T + h * T) * ITEM)
    assert block.flops() == Affine(0, 24 * T * d * d + 4 * T * T * d)
    assert block.parameters == 12 * d * d + 13 * d


@pytest.mark.parametrize("network", slow_where(lambda network: network in ("tokens", "without data"), NETWORKS))
def test_fake_tensors_cost_what_real_ones_do(network):
    layers, x, fake = counted_network(network)
    assert fake == layer_costs(layers, x, fake=False)


@pytest.mark.parametrize("network", slow_where(lambda network: network in ("tokens", "without data"), NETWORKS))
def test_stages_cost_what_their_layers_do_together(network):
    layers, x, apart = counted_network(network)
    bounds = [0, 2, len(layers)]
    joined = [nn.Sequential(*layers[a:b]) for a, b in ((0, 2), (2, len(layers)))]
    for merged, counted in zip(apart.stages(bounds), layer_costs(joined, x).layers, strict=True):
        for kind in "FBIW":
            assert merged.flops(kind) == counted.flops(kind), kind
        for key in ("activation", "shared", "held", "input", "output", "parameters", "gradient_bytes"):
            assert getattr(merged, key) == getattr(counted, key), key


@pytest.mark.parametrize("network", slow_where(lambda network: network == "without data", NETWORKS))
def test_forward_flops_are_those_of_the_counter_of_torch(network):
    layers, x, costs = counted_network(network)
    with counting() as counter:
        nn.Sequential(*layers)(x)
    assert costs.whole.flops().at(len(x)) == counter.get_total_flops()


def test_layers_that_are_alike_are_counted_once_and_told_apart_where_they_differ():
    x = torch.randn(4, 8)
    alike = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    other[0].weight.requires_grad_(False)
    first, second, third, fourth = layer_costs([*alike, other], x).layers
    assert second == layer_costs([*alike, other], x, fake=False).layers[1]
    assert (second.backward, second.activation) == (third.backward, third.activation)
    assert first.backward != second.backward
    assert fourth.flops("W").each < third.flops("W").each


class Passing(nn.Module):
    """Hands on one of its inputs as it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, kept):
        """[N, 8], [N, 3] -> the same shapes."""
        return self.linear(x), kept


def test_layers_that_are_alike_and_hand_on_an_input_cost_what_real_ones_do():
    layers, x = [Passing() for _ in range(3)], (torch.randn(4, 8), torch.randn(4, 3))
    costs = layer_costs(layers, x)
    assert costs == layer_costs(layers, x, fake=False)
    assert [layer.output for layer in costs.layers] == [Affine(0, (8 + 3) * ITEM)] * 3


def test_nothing_is_changed():
    layers, x = images()
    layers[0].eval()
    before = {k: v.clone() for k, v in nn.Sequential(*layers).state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for fake in (True, False):
        layer_costs(layers, x, loss=cross_entropy, target=torch.zeros(6, dtype=torch.int64), fake=fake)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(before[k], v) for k, v in nn.Sequential(*layers).state_dict().items())
    assert not layers[0].training
    assert layers[1].training
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_a_loss_is_the_last_row():
    layers, x = mlp()
    loss = layer_costs(layers, x, loss=cross_entropy, target=torch.zeros(6, dtype=torch.int64)).layers[-1]
    assert (loss.name, loss.output, loss.flops("B").each) == ("loss", Affine(ITEM, 0), 0)
    assert loss.activation.each >= 3 * ITEM  # log-probabilities
    with pytest.raises(UsageError, match="give both"):
        layer_costs(layers, x, loss=cross_entropy)


def test_half_the_bytes_in_bfloat16():
    layers, x = mlp()
    full = layer_costs(layers, x).whole
    half = layer_costs([layer.bfloat16() for layer in layers], x.bfloat16())
    assert half.dtype == "bfloat16"
    assert half.whole.activation.each == full.activation.each / 2
    assert half.whole.flops() == full.flops()


def test_a_table_survives_json():
    layers, x = mlp()
    named = layer_costs(layers, x, names=[f"layer {i}" for i in range(len(layers))])
    for costs in (named, counted_network("images")[2]):
        assert ModelCosts.of(json.loads(json.dumps(costs.to_dict()))) == costs


def test_mistakes():
    layers, x = mlp()
    costs = layer_costs(layers, x)
    with pytest.raises(UsageError, match=r"bounds=\[0, 2\] for 3 layers"):
        costs.stages([0, 2])
    with pytest.raises(UsageError, match="layer 2 cannot take what reaches it"):
        layer_costs([layers[0], layers[1], nn.Linear(9, 1)], x)
    with pytest.raises(UsageError, match="unknown network 'gpt3': did you mean 'gpt3-"):
        published("gpt3")


def counted(name, examples):
    network = published(name)
    with faking():
        layers, x, y = network.layers(), network.example(examples), network.target(examples)
    return layer_costs(layers, x, loss=network.loss, target=y), x


@pytest.mark.slow
def test_alexnet_keeps_782_mb_at_batch_128_as_the_lecture_counts():
    """It counts the input and every layer's output, the first two ReLUs apart: 782 MB in single precision.

    What autograd keeps is more by the normalisations' inner values and less by outputs that no backward needs.
    """
    costs, x = counted("alexnet-227", 128)
    by_hand = 227 * 227 * 3 + 55 * 55 * 96 * 2 + 96 * 27 * 27 * 2 + 256 * 27 * 27 * 2 + 256 * 13 * 13 * 2
    by_hand += 13 * 13 * 384 * 2 + 256 * 13 * 13 + 6 * 6 * 256 + 4096 + 4096 + 1000
    layers = costs.layers[:-1]
    assert layers[0].input.at(128) + sum(layer.output.at(128) for layer in layers) == 128 * by_hand * ITEM
    assert round(128 * by_hand * ITEM / 1e6) == 782
    assert 0.9 < costs.whole.activation.at(128) / 782e6 < 1.3
    assert costs.whole.parameters == 60_965_224
    assert x.nbytes == 128 * 3 * 227 * 227 * ITEM


@pytest.mark.slow
def test_resnet_152_at_4096_pixels_without_memory():
    before = resident()
    costs, _ = counted("resnet152-4096", 1)
    assert costs.whole.parameters == 60_192_808
    # torchvision's page: 11.51 billion multiplications and additions, each pair once, for 224 pixels
    assert costs.whole.flops().each == pytest.approx(2 * 11.51e9 * (4096 / 224) ** 2, rel=0.01)
    assert costs.whole.activation.each > 50e9
    assert resident() - before < 200e6


@pytest.mark.slow
def test_gpt_3_without_memory():
    before = resident()
    costs, _ = counted("gpt3-175b", 1)
    whole = costs.whole
    d, layers, T, vocabulary = 12288, 96, 2048, 50257
    assert whole.parameters == layers * (12 * d * d + 13 * d) + 2 * vocabulary * d + T * d + 2 * d
    assert whole.parameters == pytest.approx(175e9, rel=0.01)
    scores = (0.5 + 220 / T) * T * T * d  # those that causal attention computes
    assert whole.flops().each == layers * (24 * T * d * d + 4 * scores) + 2 * T * d * vocabulary
    # a backward is two forwards and, for attention, the scores again: 10 T T d instead of 8
    assert whole.flops("B").each == layers * (48 * T * d * d + 10 * scores) + 4 * T * d * vocabulary
    block = costs.layers[1]
    assert block.activation.each == (16 * d * T + 4 * T + 96 * T) * ITEM
    assert len(costs.layers) == 99
    assert resident() - before < 200e6


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096


def test_every_published_network_is_made_of_layers():
    for name in PUBLISHED:
        network = PUBLISHED[name]()
        assert len(network.recipe) >= 10
        assert callable(network.loss)


@pytest.mark.parametrize("network", slow_where(lambda network: network == "without data", NETWORKS))
def test_what_a_stage_holds_is_what_torch_s_allocator_gives_out(network):
    layers, x, costs = counted_network(network)
    model = nn.Sequential(*layers)
    model(x)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        output = model(x)  # and its graph, which keeps what a backward needs
    given = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert output.requires_grad
    assert costs.whole.held.at(len(x)) == given + x.nbytes
