"""Runs on data that is read when a batch needs it."""

import pytest
from PIL import Image

from stretto.settings.runs import TrainSettings
from stretto.study import run
from stretto.study.prepare import resolve


@pytest.fixture
def pictures(tmp_path):
    for split, number in (("train", 20), ("val", 4)):
        for name, color in (("cat", (250, 0, 0)), ("dog", (0, 0, 250))):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (20, 30), color).save(folder / f"{index}.JPEG")
    return str(tmp_path / "pictures")


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.txt").write_text("the cat sat on the mat\n" * 200, encoding="utf-8")
    return str(folder)


def test_pictures_are_learned(pictures, tmp_path):
    settings = TrainSettings(
        model="cnn", model_options={"depth": 2, "width": 4}, data="imagenet",
        data_options={"path": pictures, "side": 8}, method="pb", steps=30, evaluations=2, batch_size=8,
    )  # fmt: skip
    record = run(resolve(settings), tmp_path / "run")
    assert record.test_accuracy == 1


def test_text_by_byte_pairs_is_learned(text, tmp_path):
    settings = TrainSettings(
        model="transformer", model_options={"depth": 2, "width": 16}, data="text",
        data_options={"path": text, "level": "bpe", "context": 8, "vocabulary": 270}, method="pb",
        steps=20, evaluations=2, batch_size=4,
    )  # fmt: skip
    record = run(resolve(settings), tmp_path / "run")
    assert record.test_loss < record.points[0].validation_loss
