"""Number words, and pairs of sentences as tensors."""

import pytest
import torch

from stretto.data import load
from stretto.data.translation import BEGIN, END, PAD, english, german, translation
from stretto.errors import UsageError
from stretto.nn.batch import IGNORED

WORDS = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    7: ("seven", "sieben"),
    11: ("eleven", "elf"),
    17: ("seventeen", "siebzehn"),
    20: ("twenty", "zwanzig"),
    31: ("thirty one", "ein und dreißig"),
    66: ("sixty six", "sechs und sechzig"),
    100: ("one hundred", "ein hundert"),
    101: ("one hundred one", "ein hundert eins"),
    211: ("two hundred eleven", "zwei hundert elf"),
    1001: ("one thousand one", "ein tausend eins"),
    21_000: ("twenty one thousand", "ein und zwanzig tausend"),
    101_000: ("one hundred one thousand", "ein hundert ein tausend"),
    999_999: (
        "nine hundred ninety nine thousand nine hundred ninety nine",
        "neun hundert neun und neunzig tausend neun hundert neun und neunzig",
    ),
}


@pytest.mark.parametrize("number", WORDS)
def test_numbers_in_words(number):
    assert (" ".join(english(number)), " ".join(german(number))) == WORDS[number]


def test_no_two_numbers_have_the_same_words():
    for say in (english, german):
        assert len({tuple(say(number)) for number in range(20_000)}) == 20_000


def test_an_example_is_a_pair_the_decoder_reads_what_it_has_said_and_padding_asks_for_nothing():
    pairs = [("ab", "xyz"), ("a", "x")]
    data = translation("toy", {"train": pairs, "validation": pairs, "test": pairs}, "Letters", {})
    id_of = {word: token for token in range(4, data.num_classes) for word in [data.text([token])]}
    a, b, x, y, z = (id_of[letter] for letter in "abxyz")
    assert data.train.x.tolist() == [[[a, b, PAD, PAD], [BEGIN, x, y, z]], [[a, PAD, PAD, PAD], [BEGIN, x, PAD, PAD]]]
    assert data.train.y.tolist() == [[x, y, z, END], [x, END, IGNORED, IGNORED]]
    assert (data.task, data.num_classes) == ("translation", 9)
    assert data.text([x, 3, z]) == "x <unk> z"


@pytest.fixture(scope="module")
def data():
    return load("number-words")


def test_splits_are_the_same_everywhere_and_share_no_number(data):
    assert [len(split) for split in (data.train, data.validation, data.test)] == [5000, 500, 500]
    rows = [tuple(row) for split in (data.train, data.validation, data.test) for row in split.x[:, 0].tolist()]
    assert len(set(rows)) == 6000
    again = load("number-words")
    assert torch.equal(data.train.x, again.train.x)
    assert torch.equal(data.test.y, again.test.y)


def test_digits_are_another_source_of_the_same_words(data):
    digits = load("number-words", source="digits", limit=1000, examples=1000)
    kinds = {digits.text([token]) for token in digits.train.x[:, 0].unique().tolist() if token > END}
    assert kinds == set("0123456789")
    assert digits.options == {"source": "digits", "examples": 1000, "limit": 1000}
    assert all("tausend" not in digits.text(row) for row in digits.train.y.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "word"}, "source='word'; did you mean 'words'"),
        ({"limit": 10**7}, "limit=10000000: .* choose examples <= limit <= 1000000"),
        ({"examples": 200, "limit": 100}, "examples=200, limit=100: all examples differ"),
        ({"examples": 3}, "examples=3 must be a whole number of at least 12"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(options, message):
    with pytest.raises(UsageError, match=message):
        load("number-words", **options)


PAIRS = {
    "train": ("ein Haus\ndas Haus ist gr@@ ün\n", "a house\nthe house is green\n"),
    "valid": ("ein Haus\n", "a house\n"),
    "test": ("das Haus\n", "the house\n"),
}


@pytest.fixture
def folder(tmp_path):
    for split, texts in PAIRS.items():
        for language, text in zip(("de", "en"), texts, strict=True):
            (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
    return tmp_path


def test_pairs_from_files(folder):
    data = load("parallel", path=str(folder), source="en", target="de")
    assert [len(split) for split in (data.train, data.validation, data.test)] == [2, 1, 1]
    assert data.train.x.shape == (2, 2, 6)
    assert data.text([token for token in data.train.y[1].tolist() if token > END]) == "das Haus ist grün"
    cut = load("parallel", path=str(folder), context=1, vocabulary=6)
    assert cut.num_classes == 6
    assert cut.train.y.shape == (2, 2)


def test_a_last_line_needs_no_end(folder):
    for language in ("de", "en"):
        file = folder / f"train.{language}"
        file.write_text(file.read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")
    assert len(load("parallel", path=str(folder)).train) == 2


def test_files_that_are_missing_or_do_not_fit(folder):
    (folder / "test.de").write_text("das Haus\nein Haus\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"the test split in .* has 2 lines in de and 1 in en"):
        load("parallel", path=str(folder))
    (folder / "valid.en").unlink()
    with pytest.raises(
        UsageError, match=r"validation.en or valid.en or dev.en is not in .*prepare-iwslt14.sh leaves it"
    ):
        load("parallel", path=str(folder))
