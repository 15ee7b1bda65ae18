"""Pictures of any size as images of one size, decoded when a batch needs them; ImageNet, or others in folders."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.data.dataset import Dataset, Split, stratify
from stretto.errors import UsageError
from stretto.options.named import whole

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training pictures, as the field takes them
CENTRE = 0.875  # of the shorter side: 224 of 256
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop (Szegedy et al. 2015)

Open = Callable[[int], Any]
"""A function from a row to its PIL image."""


class Pictures:
    """Examples x float32 [N, 3, side, side]: crops of the pictures that `opens` opens, one for each of `rows`."""

    def __init__(self, opens: Open, rows: Sequence[int], side: int) -> None:
        pillow()  # raises now rather than at the first batch
        self._opens = opens
        self._rows = rows
        self._side = side

    @property
    def shape(self) -> torch.Size:
        """The shape [N, 3, side, side] of all examples."""
        return torch.Size((len(self), 3, self._side, self._side))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        if isinstance(rows, int):
            return self._stack([rows], _centre)[0]
        chosen = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows.tolist()
        return self._stack(chosen, _centre)

    def cropped(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Random crops of these rows, resized to side x side, half of them mirrored (Szegedy et al. 2015)."""
        draws = torch.rand(len(rows), 5, generator=generator).tolist()
        boxes = iter(draws)
        images = self._stack(rows.tolist(), lambda width, height: _random(width, height, next(boxes)))
        mirrored = torch.tensor([draw[4] < 0.5 for draw in draws])
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)

    def _stack(self, rows: Iterable[int], box_of: Callable[[int, int], tuple[float, ...]]) -> Tensor:
        images, size, smooth = [], (self._side, self._side), pillow().Resampling.BILINEAR
        for row in rows:
            with self._opens(self._rows[row]) as picture:
                box = box_of(*picture.size)
                images.append(np.asarray(picture.convert("RGB").resize(size, smooth, box)))
        stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(channels)[:, None, None] for channels in (MEAN, STD))
        return ((stacked - mean) / std).contiguous()


def random_crop(pictures: Pictures, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Random crops of these rows: a `Split`'s augment."""
    return pictures.cropped(rows, generator)


def pillow() -> Any:
    """PIL.Image. Raises UsageError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            'pictures are decoded by Pillow, which is not installed: pip install pillow, or "stretto[images]"'
        ) from error
    return Image


def _centre(width: int, height: int) -> tuple[float, ...]:
    side = CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random(width: int, height: int, draw: Sequence[float]) -> tuple[float, ...]:
    # Where a crop would be wider or higher than the picture, it is as wide or as high.
    area = width * height * (AREA[0] + (AREA[1] - AREA[0]) * draw[0])
    low, high = map(math.log, RATIO)
    ratio = math.exp(low + (high - low) * draw[1])
    across, down = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = (width - across) * draw[2], (height - down) * draw[3]
    return left, top, left + across, top + down


ENDINGS = {".jpeg", ".jpg", ".png"}
TRAIN_SHARE = 0.95  # of each class; the rest is the validation split


def imagenet(*, path: str = "data/imagenet", side: int = 224, augment: bool = True) -> Dataset:
    """Images x float32 [N, 3, side, side] and classes y, from `path`/train/CLASS/*.JPEG and `path`/val/CLASS/*.JPEG.

    ImageNet does not publish the classes of its test pictures: its validation pictures are the test split here, and a
    twentieth of each class of the training pictures is the validation split. Training batches are random crops, half
    of them mirrored; all others, and without `augment` all, are centre crops. Pictures are decoded when a batch needs
    them. Raises UsageError for missing folders.
    """
    whole("data set 'imagenet'", "side", side)
    root = Path(path)
    classes = sorted(folder.name for folder in _folder(root, "train").iterdir() if folder.is_dir())
    files, labels = _listed(root, "train", classes)
    test_files, test_labels = _listed(root, "val", classes)
    train, validation = stratify(labels, (TRAIN_SHARE,))
    sizes = f"{len(train)} train, {len(validation)} validation and {len(test_files)} test pictures"

    def pictures(of: list[str], rows: torch.Tensor) -> Pictures:
        return Pictures(lambda row: pillow().open(of[row]), rows.tolist(), side)

    return Dataset(
        name="imagenet",
        task="classification",
        num_classes=len(classes),
        train=Split(pictures(files, train), labels[train], random_crop if augment else None),
        validation=Split(pictures(files, validation), labels[validation]),
        test=Split(pictures(test_files, torch.arange(len(test_files))), test_labels),
        description=f"Pictures from {root}: {sizes} of {len(classes)} classes, {side} x {side}.",
        options={"path": path, "side": side, "augment": augment},
    )


def _listed(root: Path, split: str, classes: list[str]) -> tuple[list[str], torch.Tensor]:
    """The files of a split, and the number of the class of each."""
    folder = _folder(root, split)
    unknown = {entry.name for entry in folder.iterdir() if entry.is_dir()} - set(classes)
    if unknown:
        raise UsageError(f"data set 'imagenet': {folder.absolute()} has classes that train lacks: {min(unknown)}")
    labelled = [
        (str(file), number)
        for number, name in enumerate(classes)
        for file in sorted((folder / name).glob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    if not labelled:
        raise UsageError(f"data set 'imagenet': {folder.absolute()} has no folder of pictures; {_LAYOUT}")
    return [file for file, _ in labelled], torch.tensor([number for _, number in labelled])


def _folder(root: Path, split: str) -> Path:
    folder = root / split
    if not folder.is_dir():
        raise UsageError(
            f"data set 'imagenet': {folder.absolute()} is not there; fetch ILSVRC2012_img_train.tar and "
            f"ILSVRC2012_img_val.tar from https://image-net.org/download (it asks for an account), {_LAYOUT}; or say "
            "where they are: --data-options.path FOLDER"
        )
    return folder


_LAYOUT = (
    "unpack them so that there is a folder of pictures for each class: train/n01440764/*.JPEG, val/n01440764/*.JPEG"
)
