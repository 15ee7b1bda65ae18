"""A plain convolutional network."""

from functools import partial

from torch import nn

from stretto.data import Dataset
from stretto.models.images import convolution, image_of
from stretto.models.model import Recipe


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
