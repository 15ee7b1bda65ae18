"""Numbers in words as a translation task: English to German, which says units before tens ("ein und zwanzig")."""

import torch

from stretto.data.dataset import Dataset
from stretto.data.translation import Pair, translation
from stretto.errors import UsageError
from stretto.options.named import choose, whole

LIMIT = 1_000_000
HELD_OUT = 12  # one number in so many is for validation, and one for test
_SEED = 0  # part of the data set's meaning, as in data.split

ENGLISH = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
GERMAN = [
    "null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]  # fmt: skip
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
