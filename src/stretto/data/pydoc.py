"""English text that every CPython carries, the topics of `help()`, as next-token prediction by byte or by word."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from stretto.data.dataset import Dataset, Split
from stretto.data.options import whole
from stretto.data.passages import texts
from stretto.errors import UsageError, nearest

_OWNER = "data set 'pydoc'"
_VOCABULARY = 2000

# A paragraph's end, a line's end, a word, a number, a run of one punctuation mark ("***", "=="); blanks are dropped.
_WORD = re.compile(r"\n\n+|\n|[^\W\d]\w*|\d+|([^\w\s])\1*")


def pydoc(*, level: Literal["byte", "word"] = "byte", context: int = 64, vocabulary: int | None = None) -> Dataset:
    """Cut the text into windows that do not overlap: x int64 [N, context], and y the same, one token further on.

    At level "byte" the tokens are the UTF-8 bytes that the train split uses (about a hundred, fewer than all 256), at
    level "word" its `vocabulary` - 1 most frequent words, numbers, punctuation marks and line ends (`vocabulary` is
    2000 unless given, and belongs to this level only). Either way id 0 is every other token. The text is that of the
    running CPython, and so are the exact sizes.
    """
    options = _options(level, context, vocabulary)
    tokens = {name: (words if level == "word" else octets)(text) for name, text in texts().items()}
    ids = number(tokens["train"], options.get("vocabulary", 257))
    parts = {name: _windows(name, [ids.get(token, 0) for token in tokens[name]], context) for name in tokens}
    sizes = ", ".join(f"{len(parts[name])} {name}" for name in parts)
    return Dataset(
        name="pydoc",
        task="language",
        num_classes=len(ids) + 1,
        train=parts["train"],
        validation=parts["validation"],
        test=parts["test"],
        description=(
            f"CPython's help topics: {sizes} windows of {context} {level}s, {len(ids) + 1} kinds of {level}, "
            "split by topic after every repeated passage was taken out."
        ),
        options={"level": level, **options},
    )


def words(text: str) -> list[str]:
    """Cut `text` into words, numbers, runs of one punctuation mark, line ends and paragraph ends; no blanks."""
    return [match.group() for match in _WORD.finditer(text)]


def octets(text: str) -> list[str]:
    """Cut `text` into its UTF-8 bytes, one character (of code 0..255) each."""
    return list(text.encode().decode("latin-1"))


def number(tokens: Sequence[str], size: int) -> dict[str, int]:
    """Give ids 1..size-1 to the most frequent tokens, ties by the alphabet; 0 is the unknown's."""
    frequency = Counter(tokens)
    ranked = sorted(frequency, key=lambda token: (-frequency[token], token))
    return {token: i for i, token in enumerate(ranked[: size - 1], start=1)}


def _options(level: str, context: int, vocabulary: int | None) -> Mapping[str, int]:
    """Check the options and give the whole numbers among them that count at this level."""
    if level not in ("byte", "word"):
        raise UsageError(f"{_OWNER}: unknown level={level!r}; {nearest(str(level), ['byte', 'word'])}")
    whole(_OWNER, "context", context)
    if level == "word":
        size = _VOCABULARY if vocabulary is None else vocabulary
        whole(_OWNER, "vocabulary", size, least=2)
        return {"context": context, "vocabulary": size}
    if vocabulary is not None:
        raise UsageError(
            f"{_OWNER}: vocabulary={vocabulary!r} belongs to level='word'; leave it out at level='byte', "
            "whose vocabulary is the bytes that the train split uses"
        )
    return {"context": context}


def _windows(name: str, ids: Sequence[int], context: int) -> Split:
    """Cut a split's token ids into windows; y needs one token more than x."""
    num = (len(ids) - 1) // context
    if num < 1:
        raise UsageError(
            f"{_OWNER}: context={context} is too long for split {name!r} of {len(ids)} tokens; "
            f"take a context of at most {len(ids) - 1}"
        )
    stream = torch.tensor(ids[: num * context + 1], dtype=torch.int64)
    return Split(stream[:-1].view(num, context).clone(), stream[1:].view(num, context).clone())
