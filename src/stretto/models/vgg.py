"""VGG (Simonyan and Zisserman 2015), in the finest layers."""

import math
from functools import partial

from torch import nn

from stretto.data import Dataset
from stretto.models import images
from stretto.models.images import activated, convolution, image_of
from stretto.models.model import Recipe
from stretto.options.named import choose

WIDTHS = (64, 128, 256, 512, 512)  # channels of each group, which ends in a pooling
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
NORMS = (*images.NORMS, "none")


def vgg(dataset: Dataset, *, depth: int = 11, norm: str = "batch", hidden: int = 512) -> Recipe:
    """3x3 convolutions, poolings and three Linear, [N, C, H, W] -> ... -> [N, classes], for sides of 32 or more.

    Each convolution, each norm with its ReLU, and every other module is a layer: VGG-11, 13 and 16 have 29, 33 and 39.
    29 is the number of stages of Kosson et al. 2021; they do not say how they count, so these layers are our choice.

    depth: 11, 13 or 16. norm: batch, group, or none, as in the paper. hidden: units of the middle Linear, 4096 in
    the paper, for images of 224 x 224.
    """
    channels, _ = image_of("vgg", dataset, least=32)
    height, width = (side // 32 for side in dataset.train.x.shape[2:])
    return imagenet_vgg(
        depth=depth, norm=norm, hidden=hidden, channels=channels, area=height * width, classes=dataset.num_classes
    )


def imagenet_vgg(
    *, depth: int, norm: str = "none", hidden: int = 4096, channels: int = 3, area: int = 49, classes: int = 1000,
    convolutional: bool = False,
) -> Recipe:  # fmt: skip
    """The same network without data; `area` is the number of pixels behind the last pooling, a square.

    `convolutional`: the first two Linear are convolutions, of all pixels and of one, as timm has them.
    """
    choose("model 'vgg'", "depth", depth, tuple(CONVOLUTIONS))
    choose("model 'vgg'", "norm", norm, NORMS)
    recipe: Recipe = []
    for width, number in zip(WIDTHS, CONVOLUTIONS[depth], strict=True):
        for _ in range(number):
            recipe += [partial(convolution, channels, width, bias=norm == "none"), partial(activated, width, norm)]
            channels = width
        recipe.append(partial(nn.MaxPool2d, 2))
    if convolutional:
        for inputs, size in ((512, math.isqrt(area)), (hidden, 1)):
            recipe += [partial(nn.Conv2d, inputs, hidden, size), nn.ReLU, *([nn.Dropout] if size > 1 else [])]
        return [*recipe, nn.Flatten, partial(nn.Linear, hidden, classes)]
    recipe.append(nn.Flatten)
    for inputs in (512 * area, hidden):
        recipe += [nn.Dropout, partial(nn.Linear, inputs, hidden), nn.ReLU]
    return [*recipe, partial(nn.Linear, hidden, classes)]
