"""The data sets by name: digits, digit-masks, pydoc and number-words are built in, the others read files."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from stretto.data.cifar import cifar10, cifar100
from stretto.data.dataset import Dataset, Split
from stretto.data.digits import digit_masks, digits
from stretto.data.mnist import fashion_mnist, mnist
from stretto.data.pictures import imagenet
from stretto.data.pydoc import pydoc
from stretto.data.saved import saved
from stretto.data.text import text
from stretto.data.translation import number_words, parallel
from stretto.errors import UsageError
from stretto.options.checks import is_among, is_number, shown
from stretto.options.import_object import unknown
from stretto.options.named import resolve

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


DATASETS: Mapping[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "pydoc": pydoc,
    "text": text,
    "number-words": number_words,
    "digit-masks": digit_masks,
    "imagenet": imagenet,
    "saved": saved,
    "parallel": parallel,
}


def load(name: str, **options: object) -> Dataset:
    """Load the data set `name`; its options are the keyword arguments of the function in `DATASETS`.

    Classification data sets also take `random_labels`: each class is then drawn at random, so that a network can only
    memorise (Zhang et al. 2017, arXiv 1611.03530).

    Raises `UsageError` for an unknown name or option, naming the nearest known one.
    """
    if not is_among(name, DATASETS):
        raise unknown("data set", name, DATASETS)
    for_dataset = {key: value for key, value in options.items() if key != RANDOM}
    resolved = resolve(f"data set {name!r}", DATASETS[name], for_dataset)
    with torch.device("cpu"):  # whatever the default device is
        loaded = DATASETS[name](**resolved)
        return randomised(loaded, options[RANDOM]) if RANDOM in options else loaded
