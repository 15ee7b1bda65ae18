"""The handwritten digits as a segmentation task: each pixel is of a digit, or of the background."""

from dataclasses import replace

import torch

from stretto.data.dataset import Dataset, Split
from stretto.data.digits import digits


def digit_masks(*, side: int = 16) -> Dataset:
    """Load the images and splits of `digits`, with targets y int64 [N, side, side] in 0..10.

    0 is the background, 1 + d the ink of digit d: pixels that are at least half as dark as the darkest. Which digit it
    is cannot be told from a pixel alone.
    """
    plain = digits(side=side)
    ink = (plain.train.x[:].min() + plain.train.x[:].max()) / 2

    def masked(split: Split) -> Split:
        return Split(split.x, torch.where(split.x[:].squeeze(1) >= ink, split.y[:][:, None, None] + 1, 0))

    return replace(
        plain,
        name="digit-masks",
        task="segmentation",
        num_classes=11,
        train=masked(plain.train),
        validation=masked(plain.validation),
        test=None if plain.test is None else masked(plain.test),
        description=f"{plain.description} To be said of each pixel: of which digit it is, or background.",
    )
