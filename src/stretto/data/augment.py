"""Random changes of the examples of a training batch."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def crop_and_flip(x: Tensor, generator: torch.Generator, *, margin: int = 4) -> Tensor:
    """Images [N, C, H, W], padded with a margin of zeros, cropped at random to H x W, half of them mirrored.

    As in He et al. 2016, section 4.2.
    """
    count, channels, height, width = x.shape
    top, left = (torch.randint(2 * margin + 1, (count, 1), generator=generator) for _ in range(2))
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows = top + torch.arange(height)
    columns = left + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    padded = pad(x, (margin,) * 4)
    example, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[example, channel, rows[:, None, :, None], columns[:, None, None, :]]
