"""Scikit-learn's handwritten digits: small enough to train to 97 % in seconds on one core."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from stretto.data.dataset import Dataset, Split
from stretto.data.options import whole
from stretto.data.split import stratify

SIDE = 8
INK = 8  # of 16: how dark a pixel of the digit itself is


def digits(*, side: int = SIDE) -> Dataset:
    """Load images x float32 [N, 1, side, side], targets y int64 [N] in 0..9.

    A side of more than 8 pixels is interpolated from 8, bilinearly: for networks that halve their images often.

    Stratified 60/20/20; every split is shifted and scaled by the train split's one mean and one standard deviation, so
    that validation and test leave no trace in what is trained.
    """
    images, labels = _read("digits", side)
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


def digit_masks(*, side: int = 16) -> Dataset:
    """Load the same images as a task of segmentation: y int64 [N, side, side] says of which digit a pixel is.

    0 is the background, 1 + d the ink of digit d, half as dark as can be or darker. Which digit it is cannot be told
    from a pixel alone.
    """
    images, labels = _read("digit-masks", side)
    plain = digits(side=side)
    masks = torch.where(images.squeeze(1) >= INK, labels[:, None, None] + 1, 0)
    rows = stratify(labels, (0.6, 0.8))
    splits = [
        Split(each.x, masks[r]) for each, r in zip((plain.train, plain.validation, plain.test), rows, strict=True)
    ]
    return replace(
        plain,
        name="digit-masks",
        task="segmentation",
        num_classes=11,
        train=splits[0],
        validation=splits[1],
        test=splits[2],
        description=f"{plain.description} To be said of each pixel: of which digit it is, or background.",
    )


def _read(name: str, side: int) -> tuple[Tensor, Tensor]:
    """Images [N, 1, side, side] in 0..16 and labels [N]."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1)
    if side != SIDE:
        whole(f"data set {name!r}", "side", side, least=SIDE)
        images = interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    return images, torch.from_numpy(bunch.target).to(torch.int64)
