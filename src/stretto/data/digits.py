"""Scikit-learn's handwritten digits: small enough to train to 97 % in seconds on one core.

As a segmentation task, too: each pixel is of a digit, or of the background.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from stretto.data.dataset import Dataset, Split, stratify
from stretto.options.named import whole

SIDE = 8


def digits(*, side: int = SIDE) -> Dataset:
    """Load images x float32 [N, 1, side, side], targets y int64 [N] in 0..9.

    A side of more than 8 pixels is interpolated bilinearly, for networks that halve their images often.

    Stratified 60/20/20; every split is normalised by the mean and the standard deviation of all pixels of the train
    split, so that training uses nothing of validation and test.
    """
    images, labels = read()
    if side != SIDE:
        whole("data set 'digits'", "side", side, least=SIDE)
        images = interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    rows = stratify(labels, (0.6, 0.8))  # 60 % train, 20 % validation, 20 % test
    mean, std = images[rows[0]].mean(), images[rows[0]].std()
    train, validation, test = (Split((images[r] - mean) / std, labels[r]) for r in rows)
    return Dataset(
        name="digits",
        task="classification",
        num_classes=10,
        train=train,
        validation=validation,
        test=test,
        description=(
            f"Scikit-learn's {side}x{side} handwritten digits: {len(train)} train, {len(validation)} validation and "
            f"{len(test)} test images, split 60/20/20 within each class by a fixed seed and scaled by the train "
            "split's mean and deviation."
        ),
        options={"side": side},
    )


def read() -> tuple[Tensor, Tensor]:
    """All images [N, 1, 8, 8] with pixels from 0 to 16, and their labels [N]."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:  # digits.LICENSE says where it is from
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    return images.to(torch.float32).view(-1, 1, SIDE, SIDE), labels.long()


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
