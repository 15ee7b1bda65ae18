"""Folders that Hugging Face's datasets wrote."""

import sys

import pytest
from PIL import Image

from stretto.data import load
from stretto.errors import UsageError

SIZES = {"train": 8, "validation": 2, "test": 4}
COLORS = [(250, 0, 0), (0, 250, 0)]


@pytest.fixture(autouse=True)
def datasets():
    import datasets

    datasets.disable_progress_bars()
    return datasets


def write(datasets, folder, features, rows):
    parts = {split: datasets.Dataset.from_dict(rows(size), features=features) for split, size in SIZES.items()}
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    return str(folder)


def test_pictures_with_labels(datasets, tmp_path):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["red", "green"])})
    path = write(
        datasets,
        tmp_path / "pictures",
        features,
        lambda size: {
            "image": [Image.new("RGB", (20, 30), COLORS[row % 2]) for row in range(size)],
            "label": [row % 2 for row in range(size)],
        },
    )
    data = load("saved", path=path, side=8)
    assert (data.task, data.num_classes, data.train.x.shape) == ("classification", 2, (8, 3, 8, 8))
    for x, y in (*data.train.batches(8, seed=1), *data.test.batches(4)):
        assert x[:, :, 4, 4].argmax(1).tolist() == y.tolist()
    assert data.options == {"path": path, "side": 8, "augment": True}


@pytest.fixture
def text(datasets, tmp_path):
    features = datasets.Features({"text": datasets.Value("string")})
    return write(datasets, tmp_path / "text", features, lambda size: {"text": ["the cat sat on the mat"] * size})


def test_text(text):
    data = load("saved", path=text, level="word", context=4)
    assert (data.task, data.num_classes) == ("language", 7)
    assert data.train.x[0].tolist() == [1, 2, 5, 4]  # the, cat, sat, on: ties by the alphabet
    tokens = load("saved", path=text, level="bpe", context=4, vocabulary=270)
    assert tokens.num_classes <= 270
    assert tokens.train.x.shape[1] == 4
    assert tokens.options["path"] == text
    with pytest.raises(UsageError, match="belongs to level='bpe'; leave it out"):
        load("saved", path=text, tokenizer="mine.json")


def test_translations(datasets, tmp_path):
    features = datasets.Features({"translation": datasets.Translation(["en", "de"])})
    pair = {"en": "the cat sat", "de": "die Katze sa\u00df hier"}
    path = write(datasets, tmp_path / "pairs", features, lambda size: {"translation": [pair] * size})
    data = load("saved", path=path)
    assert data.task == "translation"
    assert data.train.x.shape == (8, 2, 5)
    assert data.text([token for token in data.train.y[0].tolist() if token > 3]) == pair["de"]
    cut = load("saved", path=path, context=2, vocabulary=6)
    assert cut.num_classes == 6
    assert cut.train.x.shape == (8, 2, 3)


def test_what_is_missing_is_said_with_how_to_write_it(datasets, text, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"none is not there; datasets.DatasetDict\(.*save_to_disk\(FOLDER\)"):
        load("saved", path=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no data set"):
        load("saved", path=str(tmp_path / "empty"))
    datasets.load_from_disk(text)["train"].save_to_disk(str(tmp_path / "one"))
    with pytest.raises(UsageError, match="one lacks train, validation, test"):
        load("saved", path=str(tmp_path / "one"))
    features = datasets.Features({"n": datasets.Value("int64")})
    write(datasets, tmp_path / "numbers", features, lambda size: {"n": [0] * size})
    with pytest.raises(UsageError, match="has the columns n; it needs an Image and a ClassLabel, a Translation"):
        load("saved", path=str(tmp_path / "numbers"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the package datasets, which is not installed"):
        load("saved", path=text)
