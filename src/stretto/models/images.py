"""Convolutional networks without skip connections (plain, AlexNet, VGG), and what all networks for images share."""

import math
from collections.abc import Callable
from functools import partial

from torch import nn

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.models.model import Recipe
from stretto.nn.group_norm import group_norm_for
from stretto.options.named import choose

NORMS = ("batch", "group")


def image_of(model: str, dataset: Dataset, *, least: int = 1) -> tuple[int, int]:
    """The channels and the shorter side of examples. Raises UsageError for no images, or a side below `least`."""
    shape = dataset.train.x.shape
    if len(shape) != 4:
        raise UsageError(
            f"model {model!r} needs images [N, channels, height, width], but the examples of data set {dataset.name!r} "
            f"have the shape {list(shape)}; add the missing dimensions, or take model 'mlp'"
        )
    side = min(shape[2:])
    if side < least:
        remedy = f"--data-options.side {least}" if dataset.name == "digits" else "larger images, or model 'cnn'"
        raise UsageError(
            f"model {model!r} needs images of {least} x {least} pixels or more, but those of data set "
            f"{dataset.name!r} are {shape[2]} x {shape[3]}; take {remedy}"
        )
    return shape[1], side


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """A padded convolution: the image's size is divided by the stride. A norm behind it makes a `bias` useless."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if bias:
        layer.bias = nn.Parameter(layer.weight.new_zeros(outputs))
    return layer


def normalisation(kind: str, channels: int) -> nn.Module:
    """Batch normalisation, or group normalisation with two channels a group (`stretto.nn.group_norm`)."""
    batch = nn.BatchNorm2d(channels)
    return batch if kind == "batch" else group_norm_for(batch, 2)


def activated(channels: int, norm: str) -> nn.Module:
    """A norm and ReLU; ReLU alone if `norm` is "none"."""
    return nn.ReLU() if norm == "none" else nn.Sequential(normalisation(norm, channels), nn.ReLU())


def cnn(dataset: Dataset, *, depth: int = 6, width: int = 32) -> Recipe:
    """`depth` blocks of 3x3 convolution, batch normalisation and ReLU, [N, C, H, W] -> ... -> [N, classes].

    After one third and two thirds of the depth the image is halved and the width doubled, as long as the image's
    shorter side is 4 or more. The last block also holds the mean over the image and the output Linear. Batch
    normalisation uses the statistics of each micro-batch, so a method with micro-batches is not exactly plain training.
    """
    channels, side = image_of("cnn", dataset)
    recipe: Recipe = []
    for i in range(depth):
        stride = 2 if i in {depth // 3, 2 * depth // 3} - {0} and side >= 4 else 1
        width, side = width * stride, -(-side // stride)
        classes = dataset.num_classes if i == depth - 1 else None
        recipe.append(partial(_block, inputs=channels, width=width, stride=stride, classes=classes))
        channels = width
    return recipe


def _block(*, inputs: int, width: int, stride: int, classes: int | None) -> nn.Module:
    parts: list[nn.Module] = [convolution(inputs, width, stride=stride), nn.BatchNorm2d(width), nn.ReLU()]
    if classes is not None:
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*parts)


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
        partial(convolution, channels, 96, 11, stride=4),
        partial(nn.ReLU),
        pool,
        norm,
        partial(convolution, 96, 256, 5, groups=2),
        partial(nn.ReLU),
        pool,
        norm,
        partial(activated, partial(convolution, 256, 384, 3)),
        partial(activated, partial(convolution, 384, 384, 3, groups=2)),
        partial(activated, partial(convolution, 384, 256, 3, groups=2)),
        pool,
        partial(_flat, 256 * area, hidden),
        partial(activated, partial(_linear, hidden, hidden)),
        partial(_linear, hidden, classes),
    ]
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


WIDTHS = (64, 128, 256, 512, 512)  # channels of each group, which ends in a pooling
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
NORMS_OR_NONE = (*NORMS, "none")


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
    *,
    depth: int,
    norm: str = "none",
    hidden: int = 4096,
    channels: int = 3,
    area: int = 49,
    classes: int = 1000,
    convolutional: bool = False,
) -> Recipe:
    """The same network without data; `area` is the number of pixels behind the last pooling, a square.

    `convolutional`: the first two Linear are convolutions, of all pixels and of one, as timm has them.
    """
    choose("model 'vgg'", "depth", depth, tuple(CONVOLUTIONS))
    choose("model 'vgg'", "norm", norm, NORMS_OR_NONE)
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
