"""Measures how much of validation and test text stands in another split: with the cleaning, and naively without."""

import functools
import re
import sys

import pytest

from stretto.data import load, pydoc
from stretto.errors import UsageError

WIDTH = 60


def even(text):
    return " ".join(text.split())


windows = functools.cache(pydoc.windows)


def shared(part, whole, width=WIDTH):
    """The share of the windows of `part` that occur anywhere in `whole`, white space made even in both."""
    known, own = windows(whole, width), even(part)
    starts = range(len(own) - width + 1)
    return sum(own[i : i + width] in known for i in starts) / len(starts)


def phrases(text, num=5):
    found = re.findall(r"\w+", text.lower())
    return [tuple(found[i : i + num]) for i in range(len(found) - num + 1)]


@pytest.fixture(scope="module")
def clean():
    return pydoc.texts()


@pytest.fixture(scope="module")
def naive():
    """The same split by topic, of the topics as they are."""
    return {name: "\n\n".join(chosen.values()) for name, chosen in pydoc.split(pydoc.topics()).items()}


PAIRS = [("validation", "train"), ("test", "train"), ("test", "validation")]


@pytest.mark.parametrize(("part", "whole"), PAIRS)
def test_no_paragraph_stands_in_two_splits(clean, part, whole):
    parts, wholes = ({even(p) for p in pydoc.paragraphs(clean[name])} for name in (part, whole))
    assert not parts & wholes


@pytest.mark.parametrize(("part", "whole"), PAIRS)
def test_next_to_no_window_stands_in_two_splits(clean, part, whole):
    assert shared(clean[part], clean[whole]) < 0.001
    assert shared(clean[part], clean[whole], width=30) < 0.02


@pytest.mark.parametrize("part", ["validation", pytest.param("test", marks=pytest.mark.slow)])
def test_the_measure_finds_the_leak_of_the_naive_split(naive, part):
    assert shared(naive[part], naive["train"]) > 0.2


@pytest.mark.parametrize("part", ["validation", "test"])
def test_no_paragraph_is_a_small_edit_of_one_in_train(clean, naive, part):
    """An edit every few words leaves no window alike, but it leaves phrases of five words."""

    def copies(texts):
        known = set(phrases(texts["train"]))
        own = [found for p in pydoc.paragraphs(texts[part]) if len(found := phrases(p)) >= 4]
        return sum(sum(phrase in known for phrase in found) > 0.5 * len(found) for found in own) / len(own)

    assert copies(clean) < 0.01
    assert copies(naive) > 0.2


def test_sizes_come_out_at_80_10_10(clean):
    total = sum(map(len, clean.values()))
    assert total > 200_000
    for name, share in pydoc.SHARES.items():
        assert len(clean[name]) / total == pytest.approx(share, abs=0.01)


def test_a_repetition_goes_whole_or_edited_and_a_remnant_of_headings_with_it():
    passage = "The statement is used to wrap the execution of a block with methods defined by a manager."
    source = {
        "long": f"Everything\n\n{passage}\n\n{'A text of its own that is longer. ' * 3}",
        "short": f"With\n\n{passage.replace('  ', ' ').replace('used', 'employed')}",
        "other": "Some words that stand nowhere else, and these alone remain of all.\n\nEverything",
    }
    assert pydoc.unique(source) == {
        "long": source["long"].rstrip(),
        "other": "Some words that stand nowhere else, and these alone remain of all.",
    }


def test_white_space_and_line_breaks_do_not_hide_a_repetition():
    line = "one sentence that is long enough to be told from every other sentence there is"
    assert pydoc.unique({"a": f"{line} indeed.", "b": line.replace(" ", "\n  ", 2)}) == {"a": f"{line} indeed."}


def test_each_topic_goes_whole_to_the_split_that_lacks_most():
    source = {"a": "x" * 80, "b": "y" * 10, "c": "z" * 10}
    chosen = pydoc.split(source)
    assert {name: list(topics) for name, topics in chosen.items()} == {
        "train": ["a"],
        "validation": ["b"],
        "test": ["c"],
    }


def test_a_python_without_topics_is_told_what_to_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    pydoc.texts.cache_clear()
    with pytest.raises(UsageError, match=r"pydoc_data\.topics, which this Python lacks .* --data digits"):
        load("pydoc")
