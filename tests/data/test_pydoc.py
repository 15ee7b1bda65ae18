import pytest
import torch

from stretto.data import load
from stretto.data.pydoc import texts
from stretto.data.text import number, octets, words
from stretto.errors import UsageError

SPLITS = ("train", "validation", "test")


def test_bytes_are_shifted_windows_without_overlap():
    data = load("pydoc", context=50)
    assert (data.task, data.options) == ("language", {"level": "byte", "context": 50})
    known = sorted(set(texts()["train"].encode()))
    assert data.num_classes == len(known) + 1 < 256
    for name in SPLITS:
        split, raw = getattr(data, name), texts()[name].encode()
        assert split.x.shape == split.y.shape == ((len(raw) - 1) // 50, 50)
        assert split.x.dtype == split.y.dtype == torch.int64
        assert torch.equal(split.x.flatten()[1:], split.y.flatten()[:-1])


def test_byte_ids_decode_to_the_text():
    data, text = load("pydoc"), texts()["validation"]
    ids = number(octets(texts()["train"]), 257)
    back = {i: token for token, i in ids.items()}
    assert 0 not in data.train.x, "no byte of train is unknown"
    decoded = "".join(back.get(i, "?") for i in data.validation.x[0].tolist())
    assert decoded == text.encode()[:64].decode("latin-1")


def test_word_ids_are_the_most_frequent_of_train():
    data = load("pydoc", level="word", vocabulary=500, context=32)
    assert data.num_classes == 500
    assert data.options == {"level": "word", "context": 32, "vocabulary": 500}
    frequency = torch.bincount(data.train.y.flatten(), minlength=500)
    assert (frequency[1:] > 0).all()
    assert frequency[1:20].min() > frequency[480:].max()
    assert 0 in data.train.x, "what is rarer is unknown, id 0"


def test_word_level_defaults_to_2000_words_that_cover_most_of_the_text():
    data = load("pydoc", level="word")
    assert data.num_classes == 2000
    assert (data.train.y == 0).float().mean() < 0.05
    assert (data.validation.y == 0).float().mean() < 0.15
    assert f"{len(data.train)} train" in data.description


def test_words_punctuation_and_line_ends_are_tokens_and_blanks_are_not():
    assert words('x1 == __init__("a b")\n\n  or 42…\n****') == [
        *("x1", "==", "__init__", "(", '"', "a", "b", '"', ")", "\n\n", "or", "42", "…", "\n", "****")
    ]
    assert octets("é!") == ["\xc3", "\xa9", "!"]


def test_ids_go_by_frequency_then_alphabet_and_leave_zero_to_the_unknown():
    assert number(["b", "c", "a", "b"], 3) == {"b": 1, "a": 2}
    assert number(["b", "c", "a", "b"], 300) == {"b": 1, "a": 2, "c": 3}


def test_loading_twice_gives_the_same_and_leaves_the_global_state():
    before = torch.get_rng_state()
    first, second = load("pydoc", level="word"), load("pydoc", level="word")
    assert all(torch.equal(getattr(first, name).x, getattr(second, name).x) for name in SPLITS)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_options_of_a_loaded_set_load_it_again():
    for level in ("byte", "word"):
        data = load("pydoc", level=level, context=20)
        assert torch.equal(load("pydoc", **data.options).train.x, data.train.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "words"}, "level='words'; did you mean 'word'"),
        ({"context": 0}, "context=0 must be a whole number of at least 1"),
        ({"context": "64"}, "context='64' must be a whole number"),
        ({"context": True}, "context=True must be a whole number"),
        ({"context": 10**6}, "context=1000000 is too long for split 'train' of .* take a context of at most"),
        ({"context": 10**5}, "context=100000 is too long for split 'validation'"),
        ({"level": "word", "vocabulary": 1}, "vocabulary=1 must be a whole number of at least 2"),
        ({"vocabulary": 300}, "vocabulary=300 belongs to level='word'"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError, match=f"data set 'pydoc': .*{message}"):
        load("pydoc", **options)
