"""AlexNet (Krizhevsky et al. 2012) in one column, as the reference implementation of Caffe orders its layers."""

from collections.abc import Callable
from functools import partial

from torch import nn

from stretto.data import Dataset
from stretto.models.images import image_of
from stretto.models.model import Recipe

SIDE = 227
LEAST = 67  # of which the last pooling leaves one pixel


def alexnet(dataset: Dataset, *, hidden: int = 512) -> Recipe:
    """`imagenet_alexnet` for images of any side from 67; `hidden` units of the Linear between, 4096 in the paper."""
    channels, _ = image_of("alexnet", dataset, least=LEAST)
    height, width = (_left(side) for side in dataset.train.x.shape[2:])
    return imagenet_alexnet(channels=channels, area=height * width, hidden=hidden, classes=dataset.num_classes)


def imagenet_alexnet(*, channels: int = 3, area: int = 36, hidden: int = 4096, classes: int = 1000) -> Recipe:
    """15 layers, [N, 3, 227, 227] -> ... -> [N, classes]: two groups in the second, fourth and fifth convolution.

    `area` are the pixels that the last pooling leaves.

    The first two ReLUs are layers of their own, the others change their operand in place; no dropout.
    """

    def convolution(inputs: int, outputs: int, kernel: int, *, groups: int = 1, stride: int = 1) -> nn.Module:
        padding = 0 if stride > 1 else kernel // 2
        return _drawn(nn.Conv2d(inputs, outputs, kernel, stride, padding=padding, groups=groups))

    def activated(make: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(make(), nn.ReLU(inplace=True))

    pool, norm = partial(nn.MaxPool2d, 3, 2), partial(nn.LocalResponseNorm, 5)
    recipe: Recipe = [
        partial(convolution, channels, 96, 11, stride=4), partial(nn.ReLU), pool, norm,
        partial(convolution, 96, 256, 5, groups=2), partial(nn.ReLU), pool, norm,
        partial(activated, partial(convolution, 256, 384, 3)),
        partial(activated, partial(convolution, 384, 384, 3, groups=2)),
        partial(activated, partial(convolution, 384, 256, 3, groups=2)),
        pool,
        partial(_flat, 256 * area, hidden),
        partial(activated, partial(_linear, hidden, hidden)),
        partial(_linear, hidden, classes),
    ]  # fmt: skip
    return recipe


def _flat(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), _linear(inputs, outputs), nn.ReLU(inplace=True))


def _linear(inputs: int, outputs: int) -> nn.Module:
    return _drawn(nn.Linear(inputs, outputs))


def _drawn(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """Draw weights that keep the signal's size; with torch's own nothing is learned of digits in 60 steps of SGD."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _left(side: int) -> int:
    """What is left of an image's side: a convolution of 11 by fours, three poolings of 3 by twos."""
    side = (side - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side
