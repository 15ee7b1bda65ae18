"""U-Net: the paper's convolutions, plain training when pipelined, and learning to segment."""

from itertools import islice, pairwise

import pytest
import torch
from torch import nn

from stretto import Trainer
from stretto.data import Dataset, Split, forever, load
from stretto.errors import UsageError
from stretto.measure.layer_counting import faking
from stretto.models import build
from stretto.models.unet import unet
from stretto.nn.chain import Chain


def masks(side=8, examples=6, classes=2, channels=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, channels, side, side, generator=generator)
    split = Split(x, (x.sum(1) > 0).long())
    return Dataset("masks", "segmentation", classes, split, split, split, "Masks.", {})


def test_it_has_the_convolutions_of_the_paper():
    """Figure 1 of Ronneberger et al. 2015; "in total the network has 23 convolutional layers"."""
    widths = [1, 64, 128, 256, 512, 1024]
    down = sum(9 * i * o + o + 9 * o * o + o for i, o in pairwise(widths))
    up = sum(4 * 2 * o * o + o + 9 * 2 * o * o + o + 9 * o * o + o for o in widths[1:-1])
    recipe = unet(masks(side=16), depth=4, width=64, norm="none")
    with faking():
        layers = [make() for make in recipe]
    assert sum(p.numel() for layer in layers for p in layer.parameters()) == down + up + (64 + 1) * 2 == 31_030_658
    convolutions = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(convolutions) == 23
    assert len(layers) == 27


def by_hand(layers, x, depth):
    """The same network as a recursion."""
    first, second, *rest = layers
    h = second(first(x))
    if depth == 0:
        return h, rest
    _, *inner = rest
    inside, after = by_hand(inner, nn.functional.max_pool2d(h, 2), depth - 1)
    up, third, fourth, *after = after
    return fourth(third(torch.cat([h, up.up(inside)], 1))), after


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_level_found_comes_back_at_its_side(depth):
    data = masks()
    layers = [layer.double() for layer in build("unet", data, depth=depth, width=4, norm="group").layers]
    x = data.train.x.double()
    inside, (last,) = by_hand(layers, x, depth)
    made = Chain(*layers)(x)
    assert made.shape == (6, 2, 8, 8)
    assert torch.allclose(made, last(inside))


def test_pipelined_without_staleness_it_is_plain_training():
    data, made = masks(), []
    for name in ("backprop", "1f1b"):
        model = build("unet", data, depth=2, width=4, norm="group")
        trainer = Trainer(
            [layer.double() for layer in model.layers], model.loss, lambda p: torch.optim.SGD(p, 0.1), name
        )
        for _ in range(2):
            trainer.step(data.train.x.double().repeat(3, 1, 1, 1), data.train.y.repeat(3, 1, 1))
        trainer.flush()
        made.append(trainer.gather())
    assert all(torch.allclose(value, made[1][key], atol=1e-12) for key, value in made[0].items())


def test_local_methods_say_that_no_head_fits():
    data = masks()
    model = build("unet", data, depth=1, width=4)
    with pytest.raises(UsageError, match=r"cannot choose a head: .* You can give your own: heads="):
        Trainer(model.layers, model.loss, lambda p: torch.optim.SGD(p, 0.1), "greedy", example=data.train.x)


@pytest.mark.slow
def test_it_learns_which_digit_a_pixel_is_of():
    data = load("digit-masks")
    assert data.train.y.shape == (1083, 16, 16)
    model = build("unet", data, width=8)
    network = Chain(*model.layers)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for x, y in islice(forever(data.train, 32, 0), 120):
        optimizer.zero_grad()
        model.loss(network(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        said = network.eval()(data.validation.x).argmax(1)
    ink = data.validation.y > 0
    assert (said == data.validation.y)[ink].float().mean() > 0.25  # a guess is right in a tenth
    assert 0.3 < ink.float().mean() < 0.5


def test_sides_must_be_halved_evenly():
    with pytest.raises(UsageError, match=r"depth=3 halves images 3 times, .* are 12 x 12; take sides that 8 divides"):
        build("unet", masks(side=12), depth=3)
