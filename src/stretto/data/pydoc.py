"""English text that every CPython carries, the topics of `help()`, as next-token prediction by byte or by word.

No passage is in two splits. The topics repeat each other: 'compound' holds the whole of 'class', 'for' and 'function',
'specialnames' the whole of 'customization'. Split topic by topic as they stand, 48 % of the validation text and 33 % of
the test text occur word for word in train (CPython 3.11, windows of 60 characters), and a network that memorises looks
like one that generalises. So repeated paragraphs, whole or in part, are removed first, and the rest is split by topic.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from stretto.data.dataset import Dataset
from stretto.data.text import Level, language
from stretto.errors import UsageError

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}

# Two paragraphs repeat each other if they share this many characters in a row, white space aside. At 60 about 1.4 % of
# validation's 30-character windows are still in train (one sentence, edited here and there), at 40 about 0.5 %; below
# 40 ordinary turns of phrase fall out too and the text shrinks fast (at 30 by a further sixth).
OVERLAP = 40

# A topic that keeps less than this share of itself has only its headings left.
REMNANT = 0.1


@cache
def texts() -> dict[str, str]:
    """The text of the train, validation and test splits, about 80/10/10 of the characters that are left."""
    return {name: "\n\n".join(chosen.values()) for name, chosen in split(unique(topics())).items()}


def topics() -> dict[str, str]:
    """{topic: text} of this CPython. Raises UsageError where a distribution has left them out."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UsageError(
            "data set 'pydoc' is made of the module pydoc_data.topics, which this Python lacks "
            "(some distributions package it apart, for example as python3-doc or libpython3-stdlib); "
            "install it, use a Python from python.org or uv, or use --data digits"
        ) from error
    return topics


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which blank lines separate."""
    return [part.rstrip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def windows(paragraph: str, width: int = OVERLAP) -> set[str]:
    """All substrings of `width` characters, runs of white space being one blank; a shorter paragraph as a whole."""
    even = " ".join(paragraph.split())
    return {even[i : i + width] for i in range(max(1, len(even) - width + 1))}


def unique(source: Mapping[str, str]) -> dict[str, str]:
    """Drop every paragraph that shares a window with an earlier one, and every topic that this leaves nearly empty.

    The longest topics come first: a passage stays where most of its context is, so that the text remains readable.
    """
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for topic in sorted(source, key=lambda t: (-len(source[t]), t)):
        parts = []
        for paragraph in paragraphs(source[topic]):
            substrings = windows(paragraph)
            if seen.isdisjoint(substrings):
                seen |= substrings
                parts.append(paragraph)
        text = "\n\n".join(parts)
        if len(text) >= REMNANT * len(source[topic]):
            kept[topic] = text
    return kept


def split(source: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """{split: {topic: text}}: each topic, the longest first, goes to the split that lacks most of its share."""
    total = sum(map(len, source.values()))
    lack = {name: share * total for name, share in SHARES.items()}
    chosen: dict[str, dict[str, str]] = {name: {} for name in SHARES}
    for topic in sorted(source, key=lambda t: (-len(source[t]), t)):
        name = max(lack, key=lack.__getitem__)
        lack[name] -= len(source[topic])
        chosen[name][topic] = source[topic]
    return chosen


def pydoc(*, level: Level = "byte", context: int = 64, vocabulary: int | None = None) -> Dataset:
    """The help topics of the running CPython, without repeated passages; the options are those of `language`.

    Sizes differ a little from one version of CPython to the next.
    """
    source = "CPython's help topics, split by topic after every repeated passage was taken out"
    return language("pydoc", texts(), source, level=level, context=context, vocabulary=vocabulary)
