"""ImageNet (Russakovsky et al. 2015), or other pictures in one folder for each class, from files."""

from pathlib import Path

import torch

from stretto.data.dataset import Dataset, Split, stratify
from stretto.data.pictures import Pictures, pillow, random_crop
from stretto.errors import UsageError
from stretto.options.named import whole

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
