"""Pairs of sentences as tensors for an encoder-decoder, and tokens as text; from files, or numbers in words."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from stretto.data.dataset import Dataset, Split
from stretto.data.text import SPLITS, number
from stretto.errors import UsageError
from stretto.nn.batch import IGNORED
from stretto.options.named import choose, whole
from stretto.system.path_names import in_path

PAD, BEGIN, END, UNKNOWN = range(4)
"""The first tokens of every vocabulary. Padding is not to be predicted: targets have -100 there."""

JOIN = "@@ "  # between the pieces of a word (Sennrich et al. 2016)

Pair = tuple[Sequence[str], Sequence[str]]
"""The words of a sentence, and those of its translation."""


def translation(
    name: str,
    pairs: Mapping[str, Sequence[Pair]],
    source: str,
    options: Mapping[str, object],
    *,
    vocabulary: int | None = None,
) -> Dataset:
    """Splits with x int64 [N, 2, T] and y int64 [N, T]; T is the length of the longest sentence of all splits plus 1.

    x[:, 0] is the sentence; x[:, 1] the decoder's input, BEGIN and the translation; y the decoder's target, the
    translation and END. Both languages share one vocabulary: all words of the train split, or its most frequent ones,
    so that there are `vocabulary` tokens.
    """
    words = [word for pair in pairs["train"] for sentence in pair for word in sentence]
    most = len(words) + 1 if vocabulary is None else vocabulary - UNKNOWN
    ids = {word: UNKNOWN + rank for word, rank in number(words, most).items()}
    length = 1 + max(len(sentence) for part in pairs.values() for pair in part for sentence in pair)
    splits = {split: _split(part, ids, length) for split, part in pairs.items()}
    known = {rank: word for word, rank in ids.items()}
    sizes = ", ".join(f"{len(part)} {split}" for split, part in splits.items())
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

    x = [[row(source, (), (), PAD), row(target, (BEGIN,), (), PAD)] for source, target in pairs]
    y = [row(target, (), (END,), IGNORED) for _, target in pairs]
    return Split(torch.tensor(x, dtype=torch.int64), torch.tensor(y, dtype=torch.int64))


NAMES = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
PREPARE = "https://github.com/facebookresearch/fairseq/blob/main/examples/translation/prepare-iwslt14.sh"


def parallel(
    *, path: str = "data/parallel", source: str = "de", target: str = "en", context: int = 64, vocabulary: int = 10_000
) -> Dataset:
    """Pairs of sentences from train.de and train.en, valid.de and valid.en, test.de and test.en in the folder `path`.

    Words are separated by blanks; words in pieces (`transl@@ ation`) are joined before they are scored. Sentences are
    cut after `context` words. Raises UsageError for files that are missing, or that differ in their number of lines.
    """
    owner = "data set 'parallel'"
    for name, language in (("source", source), ("target", target)):
        in_path(language, f"{owner}: {name}")
    whole(owner, "context", context)
    whole(owner, "vocabulary", vocabulary, least=UNKNOWN + 2)

    def pairs(split: str) -> list[Pair]:
        sources, targets = (_lines(Path(path), split, language) for language in (source, target))
        if len(sources) != len(targets):
            raise UsageError(
                f"{owner}: the {split} split in {Path(path).absolute()} has {len(sources)} lines in {source} and "
                f"{len(targets)} in {target}; each line is to be the translation of the other file's"
            )
        return [(one.split()[:context], other.split()[:context]) for one, other in zip(sources, targets, strict=True)]

    options = {"path": path, "source": source, "target": target, "context": context, "vocabulary": vocabulary}
    by_split = {split: pairs(split) for split in SPLITS}
    return translation("parallel", by_split, f"From {source} to {target}, in {path}", options, vocabulary=vocabulary)


def _lines(folder: Path, split: str, language: str) -> list[str]:
    files = [folder / f"{name}.{language}" for name in NAMES[split]]
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            return text.removesuffix("\n").split("\n") if text else []
    raise UsageError(
        f"data set 'parallel': {' or '.join(file.name for file in files)} is not in {folder.absolute()}; put it there "
        f"(IWSLT14 as {PREPARE} leaves it), or say where it is: --data-options.path FOLDER"
    )


LIMIT = 1_000_000
HELD_OUT = 12  # one number in so many is for validation, and one for test
_SEED = 0  # part of the data set's meaning, as in data.split

_ENGLISH = (
    "zero one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
ENGLISH = _ENGLISH.split()
ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_GERMAN = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf "
    "dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
GERMAN = _GERMAN.split()
GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def number_words(*, source: str = "words", examples: int = 6000, limit: int = LIMIT) -> Dataset:
    """Load `examples` different numbers below `limit`; a twelfth is the validation split, another one the test split.

    `source` is "words", the number in English words, or "digits". The target is the number in German words, with blanks
    between their parts: 2021 is "zwei tausend ein und zwanzig". Raises UsageError for options that do not fit.
    """
    owner = "data set 'number-words'"
    choose(owner, "source", source, ("words", "digits"))
    whole(owner, "limit", limit, least=HELD_OUT)
    whole(owner, "examples", examples, least=HELD_OUT)
    if not examples <= limit <= LIMIT:
        raise UsageError(
            f"{owner}: examples={examples}, limit={limit}: all examples differ and lie below the limit, and numbers "
            f"have words here below {LIMIT}; choose examples <= limit <= {LIMIT}"
        )
    numbers = torch.randperm(limit, generator=torch.Generator().manual_seed(_SEED))[:examples].tolist()
    held_out = examples // HELD_OUT
    parts = {
        "train": numbers[2 * held_out :],
        "validation": numbers[:held_out],
        "test": numbers[held_out : 2 * held_out],
    }
    say = english if source == "words" else digits
    pairs: dict[str, list[Pair]] = {split: [(say(n), german(n)) for n in part] for split, part in parts.items()}
    return translation(
        "number-words",
        pairs,
        f"Numbers below {limit:,} from {'English words' if source == 'words' else 'digits'} to German words",
        {"source": source, "examples": examples, "limit": limit},
    )


def digits(number: int) -> list[str]:
    """The digits of a number: 1021 is 1, 0, 2, 1."""
    return list(str(number))


def english(number: int) -> list[str]:
    """English words of a number below a million: 1021 is one, thousand, twenty, one."""
    for value, name in ((1000, "thousand"), (100, "hundred")):
        if number >= value:
            rest = english(number % value) if number % value else []
            return [*english(number // value), name, *rest]
    if number < 20:
        return [ENGLISH[number]]
    return [ENGLISH_TENS[number // 10 - 2], *([ENGLISH[number % 10]] if number % 10 else [])]


def german(number: int) -> list[str]:
    """German words of a number below a million: 1021 is ein, tausend, ein, und, zwanzig. A final 1 is "eins"."""
    return [*_german(number)[:-1], "eins"] if number % 100 == 1 else _german(number)


def _german(number: int) -> list[str]:
    for value, name in ((1000, "tausend"), (100, "hundert")):
        if number >= value:
            rest = _german(number % value) if number % value else []
            return [*_german(number // value), name, *rest]
    if number < 20:
        return [GERMAN[number]]
    return [*([GERMAN[number % 10], "und"] if number % 10 else []), GERMAN_TENS[number // 10 - 2]]
