"""The first layer's filters as pictures, each scaled by its least and largest value.

As in Laskin, Metz et al. 2020, figure 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST = 36  # pictures: the first ones


@dataclass(frozen=True)
class Filters:
    """Pictures of `channels` x `height` x `width` bytes, row by row, each in hexadecimal."""

    channels: int
    height: int
    width: int
    pictures: tuple[str, ...]


def filters(model: nn.Module, example: Sequence[int]) -> Filters | None:
    """Those of the first layer with weights, for images of a shape [channels, height, width].

    They are the kernels of a convolution, or the rows of a Linear that takes whole images. None for any other layer.
    """
    layer = next((each for each in model.modules() if getattr(each, "weight", None) is not None), None)
    if isinstance(layer, nn.Conv2d):
        return drawn(layer.weight)
    if isinstance(layer, nn.Linear) and len(example) == 3 and layer.in_features == torch.Size(example).numel():
        return drawn(layer.weight.reshape(-1, *example))
    return None


def drawn(weights: Tensor) -> Filters:
    """Weights [n, channels, height, width] as pictures."""
    chosen = weights.detach()[:MOST].double().cpu()
    low, high = (f(chosen, (1, 2, 3), keepdim=True) for f in (torch.amin, torch.amax))
    scaled = (255 * (chosen - low) / (high - low).clamp_min(1e-30)).round().clamp(0, 255).to(torch.uint8)
    pictures = tuple(bytes(each.flatten().tolist()).hex() for each in scaled)
    _, channels, height, width = chosen.shape
    return Filters(channels, height, width, pictures)
