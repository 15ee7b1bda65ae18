"""Text by byte-pair encoding, from files that are read where they are needed."""

import json
import sys
from itertools import islice

import numpy as np
import pytest
import tokenizers
import torch

from stretto.data import forever, load
from stretto.data.text import Windows
from stretto.errors import UsageError

LINES = "the cat sat on the mat and the dog sat on the log\n"
LM1B = {
    "train": "training-monolingual.tokenized.shuffled/news.en-{:05}-of-00100",
    "validation": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",
    "test": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
}


@pytest.fixture
def folder(tmp_path):
    for split, text in (("train", LINES * 40), ("validation", LINES * 4), ("test", "the Dög sat\n" * 20)):
        for number in range(1, 3 if split == "train" else 2):
            path = tmp_path / LM1B[split].format(number)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return tmp_path


def decoded(folder, windows):
    (file,) = (folder / ".tokens").glob("bpe-*.json")
    return tokenizers.Tokenizer.from_file(str(file)).decode(windows.flatten().tolist())


def test_windows_are_the_text_and_targets_one_token_on(folder):
    data = load("text", path=str(folder), level="bpe", context=6, vocabulary=280)
    whole = decoded(folder, data.train.x[:])
    assert (LINES * 80).startswith(whole)
    assert len(whole) > 0.99 * 80 * len(LINES)
    assert data.train.x.shape == (len(data.train), 6)
    assert torch.equal(data.train.x[:].flatten()[1:], data.train.y[:].flatten()[:-1])
    assert decoded(folder, data.test.x[:]).startswith("the Dög sat\nthe"), "what train lacks is written in bytes"
    assert 256 < data.num_classes <= 280, "there is no more to learn in so little text"
    assert data.options == {"path": str(folder), "level": "bpe", "context": 6, "vocabulary": 280}
    assert data.train.x[1].shape == (6,)


def test_tokens_stay_in_a_file_and_are_made_again_when_the_text_changes(folder):
    options = {"path": str(folder), "level": "bpe", "context": 6, "vocabulary": 280}
    first = load("text", **options)
    assert isinstance(first.train.x._ids, np.memmap)
    made = {file: file.stat().st_mtime_ns for file in (folder / ".tokens").iterdir()}
    load("text", **options)
    assert {file: file.stat().st_mtime_ns for file in (folder / ".tokens").iterdir()} == made
    test = folder / LM1B["test"]
    test.write_text("the cat\n" * 20, encoding="utf-8")
    assert "cat" in decoded(folder, load("text", **options).test.x[:])
    assert len(list((folder / ".tokens").iterdir())) == len(made) + 1


def test_a_run_that_goes_on_sees_the_batches_it_would_have_seen(folder):
    split = load("text", path=str(folder), level="bpe", context=6, vocabulary=280).train
    later = islice(forever(split, 16, 5, start=9), 3)
    for (x, y), (same_x, same_y) in zip(islice(forever(split, 16, 5), 9, 12), later, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_tokenizer_of_ones_own(folder, tmp_path):
    words = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, "on": 4}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    data = load("text", path=str(folder), level="bpe", context=6, tokenizer=str(tmp_path / "tokenizer.json"))
    assert data.train.x[0].tolist() == [1, 2, 3, 4, 1, 0]
    assert data.num_classes == 5
    assert "vocab" in json.loads((tmp_path / "tokenizer.json").read_text())["model"]


def test_rows_come_as_from_a_tensor():
    windows = Windows(np.arange(32, dtype=np.uint16), 5, 1)
    tensor = torch.arange(1, 31).view(6, 5)
    assert len(windows) == 6
    for rows in (slice(1, 3), slice(None), 2, -1, torch.tensor([4, 0, 4])):
        assert torch.equal(windows[rows], tensor[rows])


def test_mistakes_are_refused_with_a_remedy(folder, monkeypatch):
    options = {"path": str(folder), "level": "bpe"}
    for wrong, message in (
        ({"vocabulary": 100}, "vocabulary=100 must be a whole number of at least 256"),
        ({"tokenizer": "none.json"}, r"tokenizer='none.json', vocabulary=None: give the file of a tokenizer"),
        ({"context": 10**6}, r"context=1000000 is too long for split 'train' of \d+ tokens; take a context of at most"),
        ({"level": "byte", "tokenizer": "x"}, "tokenizer='x' belongs to level='bpe'"),
    ):
        with pytest.raises(UsageError, match=message):
            load("text", **{**options, **wrong})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="needs the package tokenizers, which is not installed: pip install"):
        load("text", **options)
