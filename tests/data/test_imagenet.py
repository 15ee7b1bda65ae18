"""Pictures in a folder a class, from small files in the true format."""

import sys
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from stretto.data import forever, load
from stretto.data.pictures import MEAN, STD
from stretto.errors import UsageError

CLASSES = {"n01440764": (250, 0, 0), "n01443537": (0, 250, 0), "n02056570": (0, 0, 250)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    for split, number in (("train", 20), ("val", 4)):
        for name, color in CLASSES.items():
            (root / split / name).mkdir(parents=True)
            for index in range(number):
                picture = Image.new("RGB", (40 + index, 60 - index), color)
                picture.paste((255, 255, 255), (0, 0, 10, 60))  # the left is white
                picture.save(root / split / name / f"{name}_{index}.JPEG", quality=95)
    return str(root)


def pixels(x):
    """As numbers from 0 to 1 again."""
    return x * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


def test_splits_classes_and_sizes(folder):
    data = load("imagenet", path=folder, side=16)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [57, 3, 12]
    assert data.num_classes == 3
    assert sorted(data.validation.y.tolist()) == [0, 1, 2]
    assert data.train.x.shape == (57, 3, 16, 16)
    for x, y in (*data.train.batches(19), *data.test.batches(6)):
        assert pixels(x)[:, :, 8, 12].argmax(1).tolist() == y.tolist()
    assert data.train.x[0].shape == (3, 16, 16)


def test_other_batches_are_the_centre(folder):
    """Of a picture of 40 x 60: 35 x 35, from 2.5 to 37.5 across."""
    data = load("imagenet", path=folder, side=35)
    picture = np.asarray(Image.open(f"{folder}/val/n01440764/n01440764_0.JPEG")) / 255
    seen = pixels(data.test.x[:1])[0].permute(1, 2, 0).numpy()
    assert np.abs(seen[10, 20] - picture[22, 22]).max() < 0.02
    assert (seen[:, :6] > 0.9).all()
    assert (seen[:, 9:, 1] < 0.1).all()
    assert torch.equal(data.test.x[torch.tensor([0])], data.test.x[:1])


def test_training_batches_are_drawn_by_the_seed(folder):
    data = load("imagenet", path=folder, side=16)
    once, again, other = (next(data.train.batches(57, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(once[0], again[0])
    assert not torch.equal(once[0], other[0])
    white = (pixels(once[0]).amin(1) > 0.8).float().mean(1)  # of each column
    assert white[:, 0].mean() > 0.1
    assert white[:, -1].mean() > 0.1, "some are mirrored"
    assert pixels(once[0])[:, :, 8, 8].argmax(1)[white[:, 8] < 0.5].tolist() == once[1][white[:, 8] < 0.5].tolist()
    plain = load("imagenet", path=folder, side=16, augment=False)
    assert plain.train.augment is None


def test_a_run_that_goes_on_sees_the_batches_it_would_have_seen(folder):
    split = load("imagenet", path=folder, side=8).train
    whole = list(islice(forever(split, 16, 5), 7))
    later = list(islice(forever(split, 16, 5, start=4), 3))
    for (x, y), (same_x, same_y) in zip(whole[4:], later, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_what_is_missing_is_said_with_where_to_get_it(tmp_path, folder, monkeypatch):
    with pytest.raises(
        UsageError, match=r"train is not there; fetch ILSVRC2012_img_train.tar .* train/n01440764/\*.JPEG"
    ):
        load("imagenet", path=str(tmp_path))
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(UsageError, match="train has no folder of pictures; unpack"):
        load("imagenet", path=str(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"Pillow, which is not installed: pip install pillow"):
        load("imagenet", path=folder)
