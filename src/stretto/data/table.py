"""The data sets by name: digits, digit-masks, pydoc and number-words are built in, the others read files."""

from collections.abc import Callable, Mapping

import torch

from stretto.data.cifar import cifar10, cifar100
from stretto.data.dataset import Dataset
from stretto.data.digit_masks import digit_masks
from stretto.data.digits import digits
from stretto.data.imagenet import imagenet
from stretto.data.labels import RANDOM, randomised
from stretto.data.mnist import fashion_mnist, mnist
from stretto.data.number_words import number_words
from stretto.data.parallel import parallel
from stretto.data.pydoc import pydoc
from stretto.data.saved import saved
from stretto.data.text import text
from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, shown
from stretto.options.named import resolve

DATASETS: Mapping[str, Callable[..., Dataset]] = {
    "digits": digits, "mnist": mnist, "fashion-mnist": fashion_mnist, "cifar10": cifar10, "cifar100": cifar100,
    "pydoc": pydoc, "text": text,
    "number-words": number_words, "digit-masks": digit_masks,
    "imagenet": imagenet, "saved": saved, "parallel": parallel,
}  # fmt: skip


def load(name: str, **options: object) -> Dataset:
    """Load the data set `name`; its options are the keyword arguments of the function in `DATASETS`.

    Classification data sets also take `random_labels` (`data/labels.py`).

    Raises `UsageError` for an unknown name or option, naming the nearest known one.
    """
    if not is_among(name, DATASETS):
        raise UsageError(
            f"unknown data set {shown(name)}: {nearest(str(name), DATASETS)}; or write path/to/file.py:function"
        )
    for_dataset = {key: value for key, value in options.items() if key != RANDOM}
    resolved = resolve(f"data set {name!r}", DATASETS[name], for_dataset)
    with torch.device("cpu"):  # whatever the default device is
        loaded = DATASETS[name](**resolved)
        return randomised(loaded, options[RANDOM]) if RANDOM in options else loaded
