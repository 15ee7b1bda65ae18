"""The networks of the papers: as many parameters as published, as many layers as stages, and they train."""

import pytest
import torch
from torch import nn

from pairwise import in_turn, slow_where, thinned
from stretto.data import Dataset, Split, load
from stretto.errors import UsageError
from stretto.measure.layer_counting import faking
from stretto.models import build
from stretto.models.images import alexnet, imagenet_alexnet, imagenet_vgg, vgg
from stretto.models.resnet import cifar_resnet, imagenet_resnet
from stretto.models.transformer import CausalAttention, rotated
from stretto.nn.chain import Chain


def images(channels=3, side=32, classes=10, examples=10):
    split = Split(torch.randn(examples, channels, side, side), torch.arange(examples) % classes)
    return Dataset("noise", "classification", classes, split, split, split, "Noise.", {})


def size(recipe):
    with faking():
        return sum(p.numel() for make in recipe for p in make().parameters())


# torchvision's documentation of each model, "num_params"; He et al. 2016, table 6 (in millions, two digits).
IMAGENET = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
VGG = {11: 132_863_336, 13: 133_047_848, 16: 138_357_544}
CIFAR = {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85, 110: 1.7}


@pytest.mark.parametrize(
    ("depth", "norm"),
    [
        *in_turn([18, 34, 50], ["batch", "group"], rounds=2, slow=1),
        *in_turn([101, 152], ["batch", "group"], rounds=2, slow=2),
    ],
)
def test_resnets_have_the_published_number_of_parameters(depth, norm):
    assert size(imagenet_resnet(depth=depth, norm=norm)) == IMAGENET[depth]


@pytest.mark.parametrize("depth", VGG)
def test_vggs_have_the_published_number_of_parameters(depth):
    assert size(imagenet_vgg(depth=depth)) == size(imagenet_vgg(depth=depth, convolutional=True)) == VGG[depth]


def test_alexnet_has_the_published_number_of_parameters():
    """60 million in Krizhevsky et al. 2012; 60,965,224 in Caffe's reference model."""
    assert size(imagenet_alexnet()) == 60_965_224


@pytest.mark.parametrize(("side", "pixels"), [(67, 1), (224, 25), (227, 36)])
def test_alexnet_takes_images_of_any_side_from_67(side, pixels):
    made = alexnet(images(side=side, examples=2), hidden=8)
    with faking():
        layers = [make() for make in made]
        x = torch.empty(1, 3, side, side)
        for layer in layers:
            x = layer(x)
    assert x.shape == (1, 10)
    assert size(made[-3:-2]) == (256 * pixels + 1) * 8


@pytest.mark.parametrize("depth", slow_where(lambda depth: depth > 50, CIFAR))
def test_resnets_for_cifar_have_the_published_number_of_parameters(depth):
    digits = len(str(CIFAR[depth]).partition(".")[2])
    assert round(size(cifar_resnet(images(), depth=depth)) / 1e6, digits) == CIFAR[depth]


@pytest.mark.parametrize(("depth", "layers"), [(20, 34), (32, 52), (44, 70), (56, 88), (110, 169)])
def test_a_resnet_for_cifar_comes_in_its_finest_layers(depth, layers):
    assert len(cifar_resnet(images(), depth=depth)) == layers


@pytest.mark.parametrize(("depth", "layers"), [(11, 29), (13, 33), (16, 39)])
def test_a_vgg_comes_in_its_finest_layers(depth, layers):
    assert len(vgg(images(), depth=depth)) == layers


NETWORKS = {
    "cifar-resnet": {"depth": 20, "norm": "group"},
    "resnet": {"depth": 18, "norm": "group"},
    "vgg": {"depth": 11, "norm": "group", "hidden": 16},
}


@pytest.mark.parametrize("name", thinned(NETWORKS, 3))
def test_every_layer_has_a_gradient_and_no_example_sees_another(name):
    data = images(examples=4)
    model = build(name, data, **NETWORKS[name])
    network, x = Chain(*model.layers).double(), data.train.x.double()
    model.loss(network(x), data.train.y).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    network.eval()
    assert torch.allclose(network(x), torch.cat([network(each) for each in x.split(1)]))


def test_a_residual_block_in_three_layers_is_that_block():
    """He et al. 2016, equations 1 and 2, with option A between groups."""
    torch.manual_seed(0)
    layers = [make() for make in cifar_resnet(images(), depth=20)]
    block = layers[2 + 3 * 3 :][:4]  # the first of the second group: 16 to 32 channels, half the side
    x = torch.randn(2, 16, 32, 32)
    kept = torch.zeros(2, 32, 16, 16)
    kept[:, :16] = x[:, :, ::2, ::2]
    first, second = block[0].layers, block[1].layers
    normed = nn.functional.batch_norm
    inner = normed(nn.functional.conv2d(x, first[0].weight, stride=2, padding=1), None, None, training=True).relu()
    wanted = (normed(nn.functional.conv2d(inner, second[0].weight, padding=1), None, None, training=True) + kept).relu()
    assert torch.allclose(Chain(*block)(x), wanted, atol=1e-5)


def test_rotary_attention_knows_distances_only():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        q, k = torch.zeros(2, 1, 1, 12, 8, dtype=torch.float64)
        q[:, :, i], k[:, :, j] = query[0, 0, 0], key[0, 0, 0]
        return (rotated(q)[0, 0, i] * rotated(k)[0, 0, j]).sum()

    assert torch.allclose(score(3, 1), score(11, 9))
    assert not torch.allclose(score(3, 1), score(3, 2))
    assert torch.allclose(rotated(query).norm(), query.norm())


def test_rotary_positions_are_seen_beyond_the_context():
    data = load("pydoc", context=16)
    network = nn.Sequential(*build("transformer", data, depth=2, positions="rotary").layers)
    tokens = data.train.x[:1]
    assert not torch.allclose(network(tokens)[0, -1], network(tokens.roll(1, 1))[0, -1])
    assert network(tokens.repeat(1, 2)).shape == (1, 32, data.num_classes)
    assert CausalAttention(8, 2, rotary=True)(torch.randn(1, 3, 8)).shape == (1, 3, 8)


def test_digits_have_any_side_from_8():
    small, large = load("digits"), load("digits", side=32)
    assert large.train.x.shape[1:] == (1, 32, 32)
    assert torch.equal(small.train.y, large.train.y)
    assert torch.allclose(large.train.x.mean(), torch.tensor(0.0), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("alexnet", "digits", {}, "needs images of 67 x 67 .* take --data-options.side 67"),
        ("vgg", "digits", {}, "needs images of 32 x 32 .* are 8 x 8; take --data-options.side 32"),
        ("resnet", "digits", {}, "needs images of 32 x 32"),
        ("cifar-resnet", "digits", {"depth": 21}, "depth=21; choose 20, 32, 44, 56, 110"),
        ("cifar-resnet", "digits", {"norm": "bath"}, "norm='bath'; did you mean 'batch'"),
        ("vgg", "noise", {"norm": "layer"}, "norm='layer'; choose from batch, group, none"),
        ("transformer", "pydoc", {"positions": "rotated"}, "did you mean 'rotary'"),
        ("transformer", "pydoc", {"positions": "rotary", "width": 12, "heads": 4}, "leaves each head 3; take width=16"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(name, data, options, message):
    with pytest.raises(UsageError, match=message):
        build(name, images() if data == "noise" else load(data), **options)


def test_digits_are_too_small_for_no_side():
    with pytest.raises(UsageError, match="side=4 must be a whole number of at least 8"):
        load("digits", side=4)
