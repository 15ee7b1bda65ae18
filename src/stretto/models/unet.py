"""U-Net (Ronneberger et al. 2015) for segmentation, in its finest layers.

The output of each level of the contracting path is passed on, through all layers between, to the level of the expanding
path with the same image size. So the network is a sequence of layers, each of which may be a stage.
"""

from functools import partial

import torch
from torch import Tensor, nn

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.models import images
from stretto.models.images import activated, convolution, image_of
from stretto.models.model import Recipe
from stretto.options.named import choose


def unet(dataset: Dataset, *, depth: int = 2, width: int = 16, norm: str = "batch") -> Recipe:
    """Halve the image `depth` times and double it again, [N, C, H, W] -> ... -> [N, classes, H, W].

    Each convolution, with its norm and ReLU, and each pooling is a layer: 6 depth + 3. Convolutions are padded, so that
    nothing is cropped. In the paper depth is 4 and width 64, without a norm: 23 convolutions. norm: batch, group, none.
    """
    channels, _ = image_of("unet", dataset)
    choose("model 'unet'", "norm", norm, (*images.NORMS, "none"))
    height, breadth = dataset.train.x.shape[2:]
    if height % 2**depth or breadth % 2**depth:
        raise UsageError(
            f"model 'unet': depth={depth} halves images {depth} times, and those of data set {dataset.name!r} are "
            f"{height} x {breadth}; take sides that {2**depth} divides, or a smaller depth"
        )
    return plain_unet(depth=depth, width=width, norm=norm, channels=channels, classes=dataset.num_classes)


def plain_unet(*, depth: int, width: int, norm: str, channels: int, classes: int) -> Recipe:
    """The same network without data."""
    widths = [width << level for level in range(depth + 1)]
    recipe: Recipe = []
    for outputs in widths:
        recipe += [] if outputs == width else [Down]
        recipe += _convolutions(channels, outputs, norm)
        channels = outputs
    for outputs in reversed(widths[:-1]):
        recipe += [partial(Up, channels, outputs), *_convolutions(2 * outputs, outputs, norm)]
        channels = outputs
    return [*recipe, partial(nn.Conv2d, width, classes, 1)]


class ConvolutionLayer(nn.Module):
    """(h, *others) -> (convolution, norm and ReLU of h, *others)."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(inputs, outputs, bias=norm == "none"), activated(outputs, norm))

    def forward(self, h: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        output: Tensor = self.layers(h)
        return (output, *others) if others else output


class Down(nn.Module):
    """(h, *others) -> (h at half its side, h, *others)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Halve the image, and pass h on for the expanding path."""
        return self.pool(h), h, *others


class Up(nn.Module):
    """(h, kept, *others) -> (kept and h at twice its side, joined, *others)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)

    def forward(self, h: Tensor, kept: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Double the image, and join it with `kept` along the channels."""
        output = torch.cat([kept, self.up(h)], dim=1)
        return (output, *others) if others else output


def _convolutions(inputs: int, outputs: int, norm: str) -> Recipe:
    return [partial(ConvolutionLayer, inputs, outputs, norm), partial(ConvolutionLayer, outputs, outputs, norm)]
