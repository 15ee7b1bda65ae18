"""Numbers in words as a translation task: English to German, which says units before tens ("ein und zwanzig")."""

import torch

from stretto.data.dataset import Dataset
from stretto.data.translation import Pair, translation
from stretto.errors import UsageError
from stretto.options.named import choose, whole

LIMIT = 1_000_000
HELD = 12  # of so many numbers one is for validation and one for test
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
    """Load `examples` numbers below `limit`, no two alike; a twelfth is the validation split, another the test split.

    source: words, the number in English words; or digits. The target is the number in German words, with a blank
    between the parts of what is written as one word: 2021 is "zwei tausend ein und zwanzig". Nothing is fetched.
    """
    owner = "data set 'number-words'"
    choose(owner, "source", source, ("words", "digits"))
    whole(owner, "limit", limit, least=HELD)
    whole(owner, "examples", examples, least=HELD)
    if not examples <= limit <= LIMIT:
        raise UsageError(
            f"{owner}: examples={examples}, limit={limit}: all examples differ and lie below the limit, and numbers "
            f"have words here below {LIMIT}; choose examples <= limit <= {LIMIT}"
        )
    numbers = torch.randperm(limit, generator=torch.Generator().manual_seed(_SEED))[:examples].tolist()
    held = examples // HELD
    parts = {"train": numbers[2 * held :], "validation": numbers[:held], "test": numbers[held : 2 * held]}
    say = english if source == "words" else digits
    pairs: dict[str, list[Pair]] = {split: [(say(n), german(n)) for n in part] for split, part in parts.items()}
    return translation(
        "number-words",
        pairs,
        f"Numbers below {limit:,} from {'English words' if source == 'words' else 'digits'} to German words",
        {"source": source, "examples": examples, "limit": limit},
    )


def digits(number: int) -> list[str]:
    """1021 as 1, 0, 2, 1."""
    return list(str(number))


def english(number: int) -> list[str]:
    """1021 as one, thousand, twenty, one, for numbers below a million."""
    for value, name in ((1000, "thousand"), (100, "hundred")):
        if number >= value:
            rest = english(number % value) if number % value else []
            return [*english(number // value), name, *rest]
    if number < 20:
        return [ENGLISH[number]]
    return [ENGLISH_TENS[number // 10 - 2], *([ENGLISH[number % 10]] if number % 10 else [])]


def german(number: int) -> list[str]:
    """1021 as ein, tausend, ein, und, zwanzig, for numbers below a million; a last 1 is "eins"."""
    return [*_german(number)[:-1], "eins"] if number % 100 == 1 else _german(number)


def _german(number: int) -> list[str]:
    for value, name in ((1000, "tausend"), (100, "hundert")):
        if number >= value:
            rest = _german(number % value) if number % value else []
            return [*_german(number // value), name, *rest]
    if number < 20:
        return [GERMAN[number]]
    return [*([GERMAN[number % 10], "und"] if number % 10 else []), GERMAN_TENS[number // 10 - 2]]
