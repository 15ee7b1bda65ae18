"""What holds for every model: seeds, shapes, counts, errors."""

from math import ceil

import pytest
import torch
from torch import nn

from stretto.data import Dataset, Split, load
from stretto.errors import UsageError
from stretto.models import build


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def pydoc():
    return load("pydoc", context=16)


@pytest.fixture
def data(request, digits, pydoc):
    return {"mlp": digits, "cnn": digits, "transformer": pydoc}[request.getfixturevalue("name")]


def images(*shape, classes=3):
    split = Split(torch.zeros(6, *shape), torch.arange(6) % classes)
    return Dataset("images", "classification", classes, split, split, split, "Blanks.", {})


def size(modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


each_model = pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])  # those of papers have tests of their own


@each_model
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_blocks_chain_to_the_classes_and_are_as_many_as_the_depth(name, data, depth):
    model = build(name, data, depth=depth, width=16)
    assert len(model.layers) == depth
    y = data.train.y[:4]
    x = nn.Sequential(*model.layers)(data.train.x[:4])
    assert x.shape == (*y.shape, data.num_classes)
    model.loss(x, y).backward()
    assert all(p.grad is not None for layer in model.layers for p in layer.parameters())


@each_model
def test_an_untrained_model_is_about_as_good_as_a_guess(name, data):
    model = build(name, data)
    loss = model.loss(nn.Sequential(*model.layers)(data.train.x[:64]), data.train.y[:64])
    guess = torch.tensor(float(data.num_classes)).log()
    assert loss.dim() == 0
    assert 0.9 * guess < loss < 2 * guess


@each_model
def test_weights_depend_on_the_seed(name, data):
    first, again, other = (build(name, data, seed=seed).layers for seed in (1, 1, 2))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_weights_of_a_block_depend_on_no_other_block(name, data):
    """Another input size changes what block 0 draws, and nothing behind it."""
    narrow, wide = build(name, images(1, 8, 8)).layers, build(name, images(3, 8, 8)).layers
    assert size(narrow[:1]) != size(wide[:1])
    assert all(same(a, b) for a, b in zip(narrow[1:], wide[1:], strict=True))
    assert not same(narrow[1], narrow[2])


def test_blocks_of_a_transformer_depend_on_no_other_block(pydoc):
    short, long = (build("transformer", load("pydoc", context=c)).layers for c in (8, 16))
    assert short[0][0].position.weight.shape != long[0][0].position.weight.shape
    assert all(same(a, b) for a, b in zip(short[1:], long[1:], strict=True))
    assert not same(short[1], short[2])


@each_model
def test_building_leaves_the_global_state_and_does_not_read_it(name, data):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(name, data)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert all(same(a, b) for a, b in zip(first.layers, build(name, data).layers, strict=True))


@each_model
def test_built_on_the_cpu_whatever_the_default_device(name, data):
    with torch.device("meta"):
        model = build(name, data)
    assert all(p.device.type == "cpu" for layer in model.layers for p in layer.parameters())


@pytest.mark.parametrize(("depth", "width"), [(1, 5), (2, 7), (8, 128)])
def test_mlp_counts_its_parameters(digits, depth, width):
    model = build("mlp", digits, depth=depth, width=width)
    expected = (64 + 1) * width + (depth - 1) * (width + 1) * width + (width + 1) * 10
    assert size(model.layers) == expected
    assert f"{expected:,} parameters" in model.description


@pytest.mark.parametrize(
    ("depth", "shape", "channels"),
    [
        (1, (1, 8, 8), (4,)),
        (2, (1, 8, 8), (4, 8)),
        (6, (1, 8, 8), (4, 4, 8, 8, 16, 16)),
        (6, (3, 6, 9), (4, 4, 8, 8, 8, 8)),
        (4, (1, 2, 8), (4, 4, 4, 4)),
        (6, (3, 32, 32), (4, 4, 8, 8, 16, 16)),
    ],
)
def test_cnn_counts_its_parameters_and_doubles_its_width_where_it_halves_the_image(depth, shape, channels):
    data = images(*shape)
    layers = build("cnn", data, depth=depth, width=4).layers
    inputs = (shape[0], *channels[:-1])
    assert (
        size(layers) == sum(9 * i * o + 2 * o for i, o in zip(inputs, channels, strict=True)) + (channels[-1] + 1) * 3
    )
    x = data.train.x
    for layer, num in zip(layers[:-1], channels[:-1], strict=True):
        x = layer(x)
        assert x.shape[1:] == (num, ceil(shape[1] * 4 / num), ceil(shape[2] * 4 / num))
    assert layers[-1](x).shape == (6, 3)


@pytest.mark.parametrize(("depth", "width", "heads"), [(1, 8, 2), (2, 12, 3), (4, 64, 4)])
def test_transformer_counts_its_parameters(pydoc, depth, width, heads):
    layers = build("transformer", pydoc, depth=depth, width=width, heads=heads).layers
    norm, attention, mlp = 2 * width, 4 * (width + 1) * width, (width + 1) * 4 * width + (4 * width + 1) * width
    ends = (16 + 2 * pydoc.num_classes) * width + norm
    assert size(layers) == ends + depth * (2 * norm + attention + mlp)


def test_transformer_does_not_see_the_future(pydoc):
    network = nn.Sequential(*build("transformer", pydoc).layers)
    x = pydoc.train.x[:1]
    changed = x.clone()
    changed[0, 10] = (x[0, 10] + 1) % pydoc.num_classes
    a, b = network(x), network(changed)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])
    assert torch.allclose(network(x[:, :5]), a[:, :5], atol=1e-5), "a shorter context is the start of a longer one"


def test_transformer_refuses_more_tokens_than_positions(pydoc):
    with pytest.raises(UsageError, match="17 tokens exceed the context of 16"):
        build("transformer", pydoc).layers[0](torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mpl", {}, "unknown model 'mpl': did you mean 'mlp'"),
        ("mlp", {"dept": 2}, "model 'mlp' has no option 'dept'; did you mean 'depth'"),
        ("cnn", {"heads": 2}, "model 'cnn' has no option 'heads'; choose from depth, width"),
        ("mlp", {"depth": 0}, "model 'mlp': depth=0 must be a whole number of at least 1"),
        ("cnn", {"width": -3}, "model 'cnn': width=-3 must be a whole number of at least 1"),
        ("mlp", {"width": 2.5}, "width=2.5 must be a whole number"),
        (
            "transformer",
            {},
            "model 'transformer' is for language, but data set 'digits' .* take one of: mlp, cnn, alexnet",
        ),
    ],
)
def test_mistakes_are_refused_with_a_remedy(digits, name, options, message):
    with pytest.raises(UsageError, match=message):
        build(name, digits, **options)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_text_is_refused_by_models_of_images(pydoc, name):
    with pytest.raises(UsageError, match=f"model '{name}' is for classification, .* take one of: transformer"):
        build(name, pydoc)


def test_cnn_refuses_what_is_no_image():
    with pytest.raises(UsageError, match=r"needs images \[N, channels, height, width\], .* shape \[6, 5\]"):
        build("cnn", images(5))


@pytest.mark.parametrize(
    ("heads", "width", "remedy"), [(3, 64, "heads=2, or width=66"), (5, 64, "heads=4, or width=65"), (9, 4, "heads=4")]
)
def test_heads_must_divide_the_width(pydoc, heads, width, remedy):
    with pytest.raises(UsageError, match=f"heads={heads} does not divide width={width}; take {remedy}"):
        build("transformer", pydoc, heads=heads, width=width)
