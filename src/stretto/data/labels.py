"""Random labels (Zhang et al. 2017, arXiv 1611.03530), which a network can only memorise."""

from dataclasses import replace

import torch

from stretto.data.dataset import Dataset, Split
from stretto.errors import UsageError
from stretto.options.checks import is_number, shown

RANDOM = "random_labels"
_SEED = 0  # the same labels in every run, so that figures can be compared


def randomised(dataset: Dataset, share: object) -> Dataset:
    """Replace the class of each training example, with probability `share`, by one drawn uniformly; True means 1.

    Validation and test keep their classes. Raises UsageError for other tasks, and for a share outside [0, 1].
    """
    if share is False or (is_number(share) and share == 0):
        return dataset
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise UsageError(f"data set {dataset.name!r}: {RANDOM}={shown(share)} must be true, or a share from 0 to 1")
    if dataset.task != "classification":
        raise UsageError(
            f"data set {dataset.name!r} is for {dataset.task}: {RANDOM} is for classes; take digits or cifar10"
        )
    draw = torch.Generator().manual_seed(_SEED)
    y = dataset.train.y[:]
    drawn = torch.randint(dataset.num_classes, y.shape, generator=draw)
    chosen = torch.rand(y.shape, generator=draw) < float(share)
    return replace(
        dataset,
        train=Split(dataset.train.x, torch.where(chosen, drawn, y), dataset.train.augment),
        description=f"{dataset.description} {float(share):.0%} of the training labels are drawn at random.",
        options={**dataset.options, RANDOM: float(share)},
    )
