"""MNIST (LeCun et al. 1998) and Fashion-MNIST (Xiao et al. 2017), from their four idx files on disk, gzip or not."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.data.dataset import Dataset, Split, stratify
from stretto.errors import UsageError

SIDE = 28
CLASSES = 10
IMAGES, LABELS = 2051, 2049  # the first number of a file: unsigned bytes in three dimensions, or in one
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
HOMES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist",
    "fashion-mnist": "https://github.com/zalandoresearch/fashion-mnist/tree/master/data/fashion",
}


def mnist(*, path: str = "data/mnist") -> Dataset:
    """Images x float32 [N, 1, 28, 28] and classes y int64 [N] in 0..9, from the folder `path`.

    A tenth of each class of the training images is the validation split, the t10k images are the test split. Every
    split is normalised by the mean and the standard deviation of all pixels of the train split. Raises UsageError for a
    file that is missing or damaged.
    """
    return _load("mnist", Path(path))


def fashion_mnist(*, path: str = "data/fashion-mnist") -> Dataset:
    """As `mnist`: the same files, of clothes."""
    return _load("fashion-mnist", Path(path))


def _load(name: str, folder: Path) -> Dataset:
    (x, y), (test_x, test_y) = (_examples(name, folder, *files) for files in FILES.values())
    train, validation = stratify(y, (0.9,))
    mean, std = x[train].mean(), x[train].std()
    return Dataset(
        name=name,
        task="classification",
        num_classes=CLASSES,
        train=Split((x[train] - mean) / std, y[train]),
        validation=Split((x[validation] - mean) / std, y[validation]),
        test=Split((test_x - mean) / std, test_y),
        description=f"{name} from {folder}: {len(train)} train, {len(validation)} validation and {len(test_y)} test "
        "images.",
        options={"path": str(folder)},
    )


def _examples(name: str, folder: Path, images: str, labels: str) -> tuple[Tensor, Tensor]:
    """The images of one file, scaled to 0..1, and the labels of another."""
    (image_path, pixels), (label_path, classes) = (
        _read(name, folder, images, IMAGES),
        _read(name, folder, labels, LABELS),
    )
    if pixels.shape[1:] != (SIDE, SIDE):
        size = " x ".join(map(str, pixels.shape[1:]))
        raise UsageError(f"data set {name!r}: {image_path} has images of {size} pixels, not {SIDE} x {SIDE}")
    if len(pixels) != len(classes):
        raise UsageError(
            f"data set {name!r}: {image_path} has {len(pixels)} images, but {label_path} {len(classes)} labels: they "
            "are not of one data set; fetch both again"
        )
    return torch.from_numpy(pixels)[:, None].float() / 255, torch.from_numpy(classes).long()


def _read(name: str, folder: Path, file: str, magic: int) -> tuple[Path, np.ndarray]:
    """The path of an idx file and what it holds: big-endian the magic number and the size of each dimension; bytes."""
    path = _find(name, folder, file)
    content = _content(name, path)
    dims = magic % 256
    start = 4 * (1 + dims)
    first, *shape = struct.unpack(f">{1 + dims}I", content[:start]) if len(content) >= start else (None,)
    if first != magic:
        begins = f"begins with {content[:4].hex(' ') or 'nothing'}, not with {magic.to_bytes(4, 'big').hex(' ')}"
        raise UsageError(f"data set {name!r}: {path} {begins}: it is damaged or another file; {_fetch(name, folder)}")
    wanted = int(np.prod(shape, dtype=object))
    if len(content) - start != wanted or not wanted:
        raise UsageError(
            f"data set {name!r}: {path} says that it holds {' x '.join(map(str, shape))} bytes, but has "
            f"{len(content) - start} after its first {start}: it is damaged; {_fetch(name, folder)}"
        )
    return path, np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)


def _find(name: str, folder: Path, file: str) -> Path:
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path.absolute()
    raise UsageError(
        f"data set {name!r}: {(folder / file).absolute()} is not there, nor with .gz; {_fetch(name, folder)}, or say "
        "where they are: --data-options.path FOLDER"
    )


def _content(name: str, path: Path) -> bytes:
    """The bytes of a file, unpacked if they are gzip's, whatever its name says."""
    try:
        packed = path.read_bytes()
        return gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
    except (EOFError, zlib.error, OSError) as error:
        what = "cannot be unpacked, it is cut short or damaged"
        what = what if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile) else "cannot be read"
        raise UsageError(f"data set {name!r}: {path} {what} ({error}); {_fetch(name, path.parent)}") from error


def _fetch(name: str, folder: Path) -> str:
    files = ", ".join(f"{file}.gz" for files in FILES.values() for file in files)
    return f"fetch {files} from {HOMES[name]} into {folder.absolute()}"
