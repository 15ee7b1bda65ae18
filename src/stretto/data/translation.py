"""Pairs of sentences as tensors that an encoder-decoder takes, and tokens as text again."""

from collections.abc import Mapping, Sequence

import torch

from stretto.data.dataset import Dataset, Split
from stretto.data.text import number
from stretto.nn.batch import IGNORED

PAD, BEGIN, END, UNKNOWN = range(4)
"""The first tokens of every vocabulary. What pads is no token to be predicted: targets have -100 there."""

JOIN = "@@ "  # what stands between the pieces of a word (Sennrich et al. 2016)

Pair = tuple[Sequence[str], Sequence[str]]
"""The words of a sentence, and those of its translation."""


def translation(
    name: str, pairs: Mapping[str, Sequence[Pair]], source: str, options: Mapping[str, object],
    *, vocabulary: int | None = None,
) -> Dataset:  # fmt: skip
    """Of each split x int64 [N, 2, T] and y int64 [N, T], T as long as the longest sentence of all splits and one more.

    x[:, 0] is the sentence; x[:, 1] what the decoder reads, its translation behind BEGIN; y what it is to say, the
    translation and END. Both languages share one vocabulary, the words of the train split, or the most frequent of
    them so that there are `vocabulary` tokens.
    """
    words = [word for pair in pairs["train"] for sentence in pair for word in sentence]
    most = len(words) + 1 if vocabulary is None else vocabulary - UNKNOWN
    ids = {word: UNKNOWN + rank for word, rank in number(words, most).items()}
    length = 1 + max(len(sentence) for each in pairs.values() for pair in each for sentence in pair)
    splits = {split: _split(each, ids, length) for split, each in pairs.items()}
    known = {rank: word for word, rank in ids.items()}
    sizes = ", ".join(f"{len(each)} {split}" for split, each in splits.items())
    return Dataset(
        name=name,
        task="translation",
        num_classes=UNKNOWN + 1 + len(ids),
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        description=f"{source}: {sizes} pairs of at most {length - 1} words, {len(ids)} kinds of word.",
        options=options,
        text=lambda tokens: " ".join(known.get(token, "<unk>") for token in tokens).replace(JOIN, ""),
    )


def _split(pairs: Sequence[Pair], ids: Mapping[str, int], length: int) -> Split:
    def row(words: Sequence[str], begin: Sequence[int], end: Sequence[int], fill: int) -> list[int]:
        tokens = [*begin, *(ids.get(word, UNKNOWN) for word in words), *end]
        return tokens + [fill] * (length - len(tokens))

    x = [[row(given, (), (), PAD), row(wanted, (BEGIN,), (), PAD)] for given, wanted in pairs]
    y = [row(wanted, (), (END,), IGNORED) for _, wanted in pairs]
    return Split(torch.tensor(x, dtype=torch.int64), torch.tensor(y, dtype=torch.int64))
