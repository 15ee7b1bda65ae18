"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the files of their "binary version" on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.data.dataset import Dataset, Split, stratify
from stretto.errors import UsageError


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


HOME = "https://www.cs.toronto.edu/~kriz"
SIDE = 32
IMAGE = 3 * SIDE * SIDE  # bytes: red, green, blue, row by row
TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]


def cifar10(*, path: str = "data/cifar-10-batches-bin", augment: bool = True) -> Dataset:
    """Images x float32 [N, 3, 32, 32] and classes y int64 [N] in 0..9, from the folder `path`.

    A tenth of each class of the training images is the validation split. Every split is normalised by the train split's
    mean and standard deviation of each channel. With `augment` training batches are cropped and flipped at random.
    Raises UsageError for a file that is missing or damaged.
    """
    return _load("cifar10", "cifar-10-binary.tar.gz", Path(path), (TRAIN, ["test_batch.bin"]), 1, 10, augment=augment)


def cifar100(*, path: str = "data/cifar-100-binary", augment: bool = True) -> Dataset:
    """As `cifar10`, with the 100 fine classes."""
    return _load(
        "cifar100", "cifar-100-binary.tar.gz", Path(path), (["train.bin"], ["test.bin"]), 2, 100, augment=augment
    )


def _load(
    name: str,
    archive: str,
    folder: Path,
    files: tuple[Sequence[str], Sequence[str]],
    labels: int,
    classes: int,
    *,
    augment: bool,
) -> Dataset:
    (x, y), (test_x, test_y) = (_read(name, archive, folder, names, labels) for names in files)
    train, validation = stratify(y, (0.9,))
    mean, std = (stat(x[train], dim=(0, 2, 3), keepdim=True) for stat in (torch.mean, torch.std))
    return Dataset(
        name=name,
        task="classification",
        num_classes=classes,
        train=Split((x[train] - mean) / std, y[train], cropped_and_flipped if augment else None),
        validation=Split((x[validation] - mean) / std, y[validation]),
        test=Split((test_x - mean) / std, test_y),
        description=f"{name} from {folder}: {len(train)} train, {len(validation)} validation and {len(test_y)} test "
        "images.",
        options={"path": str(folder), "augment": augment},
    )


def cropped_and_flipped(x: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """The images in these rows, cropped and mirrored at random: a `Split`'s augment."""
    return crop_and_flip(x[rows], generator)


def _read(name: str, archive: str, folder: Path, files: Sequence[str], labels: int) -> tuple[Tensor, Tensor]:
    """Images scaled to 0..1, and the last label of each: an example is `labels` bytes of labels, then its image."""
    parts = []
    for file in files:
        path = folder / file
        if not path.is_file():
            raise UsageError(
                f"data set {name!r}: {path.absolute()} is not there; fetch {HOME}/{archive} and unpack it in "
                f"{folder.absolute().parent}, or say where it is: --data-options.path FOLDER"
            )
        size = path.stat().st_size
        if not size or size % (labels + IMAGE):
            raise UsageError(
                f"data set {name!r}: {path.absolute()} has {size} bytes, no whole number of examples of "
                f"{labels + IMAGE}; it is damaged or another file: unpack {archive} again"
            )
        parts.append(np.fromfile(path, dtype=np.uint8).reshape(-1, labels + IMAGE))
    rows = torch.from_numpy(np.concatenate(parts))
    images = rows[:, labels:].reshape(-1, 3, SIDE, SIDE).float() / 255
    return images, rows[:, labels - 1].long()
