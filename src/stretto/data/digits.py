"""Scikit-learn's handwritten digits: small enough to train to 97 % in seconds on one core."""

import torch
from torch.nn.functional import interpolate

from stretto.data.dataset import Dataset, Split
from stretto.data.options import whole
from stretto.data.split import stratify

SIDE = 8


def digits(*, side: int = SIDE) -> Dataset:
    """Load images x float32 [N, 1, side, side], targets y int64 [N] in 0..9.

    A side of more than 8 pixels is interpolated from 8, bilinearly: for networks that halve their images often.

    Stratified 60/20/20; every split is shifted and scaled by the train split's one mean and one standard deviation, so
    that validation and test leave no trace in what is trained.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1)
    if side != SIDE:
        whole("data set 'digits'", "side", side, least=SIDE)
        images = interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
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
