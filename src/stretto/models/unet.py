"""U-Net (Ronneberger et al. 2015), in its finest layers: what is said of each pixel.

What a level of the contracting path found is passed on, beside what the next levels make of it, to the level of the
expanding path that is as wide. So the network is a row of layers, and each may be a stage.
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
    widths = [width << level for level in range(depth + 1)]
    recipe: Recipe = []
    for outputs in widths:
        recipe += [] if outputs == width else [Down]
        recipe += _convolutions(channels, outputs, norm)
        channels = outputs
    for outputs in reversed(widths[:-1]):
        recipe += [partial(Up, channels, outputs), *_convolutions(2 * outputs, outputs, norm)]
        channels = outputs
    return [*recipe, partial(nn.Conv2d, width, dataset.num_classes, 1)]


class First(nn.Module):
    """(h, *others) -> (layers of h, *others)."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(inputs, outputs, bias=norm == "none"), activated(outputs, norm))

    def forward(self, h: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Go on, and keep what later layers need."""
        made: Tensor = self.layers(h)
        return (made, *others) if others else made


class Down(nn.Module):
    """(h, *others) -> (h at half its side, h, *others)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Keep h for the layer that comes back to its side."""
        return self.pool(h), h, *others


class Up(nn.Module):
    """(h, kept, *others) -> (what was kept and h at twice its side, *others)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)

    def forward(self, h: Tensor, kept: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Join both along the channels."""
        made = torch.cat([kept, self.up(h)], dim=1)
        return (made, *others) if others else made


def _convolutions(inputs: int, outputs: int, norm: str) -> Recipe:
    return [partial(First, inputs, outputs, norm), partial(First, outputs, outputs, norm)]
