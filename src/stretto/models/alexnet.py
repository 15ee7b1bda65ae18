"""AlexNet (Krizhevsky et al. 2012) in one column, as the reference implementation of Caffe orders its layers."""

from collections.abc import Callable
from functools import partial

from torch import nn

from stretto.data import Dataset
from stretto.models.images import image_of
from stretto.models.model import Recipe

SIDE = 227
LEAST_SIDE = 67  # pixels, of which the last pooling leaves one


def alexnet(dataset: Dataset, *, hidden: int = 512) -> Recipe:
    """`imagenet_alexnet` for images of 67 x 67 pixels or more; `hidden` are the units of the middle Linear."""
    channels, _ = image_of("alexnet", dataset, least=LEAST_SIDE)
    height, width = (final_side(side) for side in dataset.train.x.shape[2:])
    return imagenet_alexnet(channels=channels, area=height * width, hidden=hidden, classes=dataset.num_classes)


def imagenet_alexnet(*, channels: int = 3, area: int = 36, hidden: int = 4096, classes: int = 1000) -> Recipe:
    """15 layers, [N, 3, 227, 227] -> ... -> [N, classes]: two groups in the second, fourth and fifth convolution.

    `area` is the number of pixels behind the last pooling. The first two ReLUs are separate layers, the others work in
    place; there is no dropout.
    """

    def convolution(inputs: int, outputs: int, kernel: int, *, groups: int = 1, stride: int = 1) -> nn.Module:
        padding = 0 if stride > 1 else kernel // 2
        return _initialised(nn.Conv2d(inputs, outputs, kernel, stride, padding=padding, groups=groups))

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
    return _initialised(nn.Linear(inputs, outputs))


def _initialised(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """Initialise a layer to keep the variance of its input; with torch's default SGD learns nothing in 60 steps."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def final_side(side: int) -> int:
    """The side behind a convolution of size 11 and stride 4, and three poolings of size 3 and stride 2."""
    side = (side - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side
