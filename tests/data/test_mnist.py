"""MNIST from small files in the true format."""

import gzip
import struct

import numpy as np
import pytest
import torch

from stretto.data import load
from stretto.errors import UsageError

RNG = np.random.default_rng(0)
NAMES = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def idx(array):
    head = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def arrays():
    labels = [np.arange(number) % 10 for number in (200, 30)]
    images = [RNG.integers(0, 256, (len(y), 28, 28), dtype=np.uint8) for y in labels]
    return dict(zip(NAMES, (images[0], labels[0], images[1], labels[1]), strict=True))


@pytest.fixture
def folder(tmp_path, arrays):
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(idx(array))
    return tmp_path


def test_splits_shapes_and_values(folder, arrays):
    data = load("mnist", path=str(folder))
    assert [len(split) for split in (data.train, data.validation, data.test)] == [180, 20, 30]
    assert torch.bincount(data.validation.y).tolist() == [2] * 10
    assert data.train.x.shape == (180, 1, 28, 28)
    assert data.train.x.dtype == torch.float32
    assert abs(float(data.train.x.mean())) < 1e-5
    assert abs(float(data.train.x.std()) - 1) < 1e-5
    assert data.test.y.tolist() == arrays[NAMES[3]].tolist()
    scaled = torch.from_numpy(arrays[NAMES[2]][:, None]).float() / 255
    slope = (data.test.x[0, 0, 3, 5] - data.test.x[0, 0, 4, 5]) / (scaled[0, 0, 3, 5] - scaled[0, 0, 4, 5])
    shift = data.test.x[0, 0, 3, 5] - slope * scaled[0, 0, 3, 5]
    assert torch.allclose(data.test.x, slope * scaled + shift, atol=1e-3)


def test_every_training_image_is_in_one_split(folder, arrays):
    data = load("mnist", path=str(folder))
    x = torch.cat([data.train.x, data.validation.x]).flatten(1)
    assert len(x.unique(dim=0)) == len(arrays[NAMES[0]])


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_packed_files_are_the_same(folder, tmp_path, name):
    plain = load(name, path=str(folder))
    packed = tmp_path / "packed"
    packed.mkdir()
    for file in NAMES[:3]:
        (packed / f"{file}.gz").write_bytes(gzip.compress((folder / file).read_bytes()))
    (packed / NAMES[3]).write_bytes(gzip.compress((folder / NAMES[3]).read_bytes()))  # a name without .gz
    data = load(name, path=str(packed))
    assert data.name == name
    for split in ("train", "validation", "test"):
        assert torch.equal(getattr(data, split).x, getattr(plain, split).x)
        assert torch.equal(getattr(data, split).y, getattr(plain, split).y)


def test_what_is_missing_is_said_with_where_to_get_it(folder):
    (folder / NAMES[1]).unlink()
    message = rf"{NAMES[1]} is not there, nor with .gz; fetch {NAMES[0]}.gz, .* from https://\S+ into .*--data-options"
    with pytest.raises(UsageError, match=message):
        load("mnist", path=str(folder))
    with pytest.raises(UsageError, match=r"data/fashion-mnist/train-images\S+ is not there.*zalandoresearch"):
        load("fashion-mnist")


DAMAGED = {
    "cut short": (0, lambda content: content[:-5], "says that it holds 200 x 28 x 28 bytes, but has 156795"),
    "too long": (3, lambda content: content + b"0", "says that it holds 30 bytes, but has 31 after its first 8"),
    "labels for images": (0, lambda _: idx(np.zeros(200)), "begins with 00 00 08 01, not with 00 00 08 03"),
    "a web page": (1, lambda _: b"<html>not found</html>", "begins with 3c 68 74 6d, not with 00 00 08 01"),
    "empty": (2, lambda _: b"", "begins with nothing"),
    "no examples": (1, lambda _: idx(np.zeros(0)), "says that it holds 0 bytes"),
    "packed and cut short": (0, lambda content: gzip.compress(content)[:-300], "cannot be unpacked"),
    "packed and damaged": (0, lambda content: gzip.compress(content)[:90] + bytes(900), "cannot be unpacked"),
    "of another size": (2, lambda _: idx(np.zeros((30, 32, 32))), "images of 32 x 32 pixels, not 28 x 28"),
    "of another number": (3, lambda _: idx(np.zeros(29)), r"has 30 images, but \S+ 29 labels"),
    "no classes": (1, lambda _: idx(np.arange(200)), "num_classes=10 allows 0..9"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_named(folder, what):
    number, change, message = DAMAGED[what]
    path = folder / NAMES[number]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=message) as caught:
        load("mnist", path=str(folder))
    assert what == "no classes" or NAMES[number] in str(caught.value)
