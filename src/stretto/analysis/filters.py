"""The first layer's filters as pictures, each scaled by its least and largest value.

As in Laskin, Metz et al. 2020, figure 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST_FILTERS = 36  # the first ones


@dataclass(frozen=True)
class Filters:
    """Filters as texts of `channels` x `height` x `width` bytes, row by row, in hexadecimal."""

    channels: int
    height: int
    width: int
    pictures: tuple[str, ...]


def filters(model: nn.Module, example: Sequence[int]) -> Filters | None:
    """The filters of the first layer with weights, for images of the shape `example`, [channels, height, width].

    These are the kernels of a convolution, or the rows of a Linear on whole images; None for any other layer.
    """
    layer = next((module for module in model.modules() if getattr(module, "weight", None) is not None), None)
    if isinstance(layer, nn.Conv2d):
        return pictures_of(layer.weight)
    if isinstance(layer, nn.Linear) and len(example) == 3 and layer.in_features == torch.Size(example).numel():
        return pictures_of(layer.weight.reshape(-1, *example))
    return None


def pictures_of(weights: Tensor) -> Filters:
    """Weights [n, channels, height, width] as pictures, each scaled from its least value (0) to its largest (255)."""
    chosen = weights.detach()[:MOST_FILTERS].double().cpu()
    low, high = (f(chosen, (1, 2, 3), keepdim=True) for f in (torch.amin, torch.amax))
    scaled = (255 * (chosen - low) / (high - low).clamp_min(1e-30)).round().clamp(0, 255).to(torch.uint8)
    pictures = tuple(bytes(filter_.flatten().tolist()).hex() for filter_ in scaled)
    _, channels, height, width = chosen.shape
    return Filters(channels, height, width, pictures)
