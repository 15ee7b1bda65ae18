"""Text as next-token prediction, by byte, by word or by learned token; and text from the user's files."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stretto.data.dataset import Dataset, Split
from stretto.errors import UsageError
from stretto.options.named import choose, whole
from stretto.system.destinations import replacing

BPE_VOCABULARY = 4096
BYTES = 256  # every byte is a token, so that nothing is unknown

Source = tuple[Callable[[], Iterator[Sequence[str]]], str]
"""A function that iterates over a split's text, some lines at a time; and a key that changes with the text."""


class Windows:
    """Windows int64 [N, context] of a stream of tokens, one after the other from token `shift` on."""

    def __init__(self, ids: "np.ndarray[Any, Any]", context: int, shift: int) -> None:
        self._ids = ids
        self._context = context
        self._shift = shift

    @property
    def shape(self) -> torch.Size:
        """The shape [N, context] of all windows; the last target needs one token more."""
        return torch.Size((len(self), self._context))

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._context

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        chosen = rows.numpy() if isinstance(rows, Tensor) else np.asarray(range(len(self))[rows])
        places = chosen[..., None] * self._context + self._shift + np.arange(self._context)
        return torch.from_numpy(self._ids[places].astype(np.int64))


def tokenized(
    name: str,
    sources: Mapping[str, Source],
    cache: Path,
    source: str,
    *,
    context: int,
    vocabulary: int | None,
    tokenizer: str | None,
) -> Dataset:
    """Cut each split into windows that do not overlap: x int64 [N, context], y the same one token later.

    The tokens are those of the file `tokenizer` (a tokenizer.json), or of a byte-pair encoding that is learned from the
    train split, with at most `vocabulary` tokens (4096 by default). The encoding and the tokens of each split are kept
    in the folder `cache`, and made again when the text changes. Raises UsageError for a split that is too short.
    """
    owner = f"data set {name!r}"
    whole(owner, "context", context)
    encoding, options = _encoding(owner, sources["train"], cache, vocabulary, tokenizer)
    ids = {split: _ids(encoding, text, cache, split) for split, text in sources.items()}
    for split, stream in ids.items():
        if len(stream) <= context:
            raise UsageError(
                f"{owner}: context={context} is too long for split {split!r} of {len(stream)} tokens; take a context "
                f"of at most {max(1, len(stream) - 1)}, or more text"
            )
    parts = {split: Split(Windows(stream, context, 0), Windows(stream, context, 1)) for split, stream in ids.items()}
    sizes = ", ".join(f"{len(part)} {split}" for split, part in parts.items())
    return Dataset(
        name=name,
        task="language",
        num_classes=encoding.get_vocab_size(),
        train=parts["train"],
        validation=parts["validation"],
        test=parts["test"],
        description=f"{source}: {sizes} windows of {context} tokens, {encoding.get_vocab_size()} kinds of token.",
        options={"level": "bpe", "context": context, **options},
    )


def _encoding(
    owner: str, train: Source, cache: Path, vocabulary: int | None, tokenizer: str | None
) -> tuple[Any, dict[str, object]]:
    """The tokenizer, and the option that determined it."""
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            f"{owner}: level='bpe' needs the package tokenizers, which is not installed: pip install tokenizers, or "
            "\"stretto[text]\"; or take level='byte'"
        ) from error
    if tokenizer is not None:
        if vocabulary is not None or not Path(tokenizer).is_file():
            raise UsageError(
                f"{owner}: tokenizer={tokenizer!r}, vocabulary={vocabulary}: give the file of a tokenizer "
                "(tokenizer.json), which has a vocabulary of its own; or leave it out to have one learned"
            )
        return tokenizers.Tokenizer.from_file(tokenizer), {"tokenizer": tokenizer}
    size = BPE_VOCABULARY if vocabulary is None else vocabulary
    whole(owner, "vocabulary", size, least=BYTES)
    file = cache / f"bpe-{size}-{_digest(train[1])}.json"
    if not file.is_file():
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator((line for lines in train[0]() for line in lines), trainer)
        _write(file, lambda path: path.write_text(made.to_str(), encoding="utf-8"))
    return tokenizers.Tokenizer.from_file(str(file)), {"vocabulary": size}


def _ids(encoding: Any, source: Source, cache: Path, split: str) -> "np.ndarray[Any, Any]":
    """The tokens of a split, memory-mapped from their file."""
    kind = np.uint16 if encoding.get_vocab_size() <= 2**16 else np.uint32
    file = cache / f"{split}-{_digest(encoding.to_str() + source[1])}.ids"
    if not file.is_file():
        _write(file, lambda path: _encode(encoding, source, path, kind))
    return np.memmap(file, dtype=kind, mode="r") if file.stat().st_size else np.empty(0, dtype=kind)


def _encode(encoding: Any, source: Source, file: Path, kind: type[np.unsignedinteger[Any]]) -> None:
    with file.open("wb") as handle:
        for lines in source[0]():
            for encoded in encoding.encode_batch(list(lines), add_special_tokens=False):
                handle.write(np.asarray(encoded.ids, dtype=kind).tobytes())


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all, even if another process writes it at the same time."""
    try:
        with replacing(file) as temporary:
            write(temporary)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error}): tokens are kept beside their text") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


VOCABULARY = 2000
CHUNK = 2**20  # characters that are read at a time
SPLITS = ("train", "validation", "test")
WIKITEXT = "https://wikitext.smerity.com/wikitext-103-raw-v1.zip"
LM1B_ARCHIVE = "https://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
# Names of each split's files: the user's own, WikiText's, and LM1B's, whose papers test on the first held-out file.
LM1B = "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{}-of-00050"
FILES = {
    "train": (
        "train.txt",
        "wiki.train.tokens",
        "wiki.train.raw",
        "training-monolingual.tokenized.shuffled/news.en-*-of-*",
    ),
    "validation": ("validation.txt", "valid.txt", "wiki.valid.tokens", "wiki.valid.raw", LM1B.format(1)),
    "test": ("test.txt", "wiki.test.tokens", "wiki.test.raw", LM1B.format(0)),
}

# A paragraph's end, a line's end, a word, a number, a run of one punctuation mark ("***", "=="); blanks are dropped.
_WORD = re.compile(r"\n\n+|\n|[^\W\d]\w*|\d+|([^\w\s])\1*")

Level = Literal["byte", "word"]


def text(
    *,
    path: str = "data/text",
    level: Level | Literal["bpe"] = "byte",
    context: int = 64,
    vocabulary: int | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    """Text from train.txt, validation.txt and test.txt (UTF-8) in the folder `path`, or WikiText's or LM1B's files.

    `level`, `context` and `vocabulary` are those of `language`. At level "bpe" the text may be larger than memory, and
    have its own `tokenizer`: see `tokenized`. Raises UsageError for a missing file.
    """
    choose("data set 'text'", "level", level, ("byte", "word", "bpe"))
    files = {split: _files(Path(path), split) for split in SPLITS}
    if level == "bpe":
        made = tokenized(
            "text",
            {split: _source(paths) for split, paths in files.items()},
            Path(path) / ".tokens",
            f"The text in {path}",
            context=context,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
        )
        return replace(made, options={"path": path, **made.options})
    refuse_tokenizer("text", tokenizer)
    texts = {split: "".join(file.read_text(encoding="utf-8") for file in paths) for split, paths in files.items()}
    made = language("text", texts, f"The text in {path}", level=level, context=context, vocabulary=vocabulary)
    return replace(made, options={"path": path, **made.options})


def language(
    name: str, texts: Mapping[str, str], source: str, *, level: Level, context: int, vocabulary: int | None
) -> Dataset:
    """Cut each split's text into windows that do not overlap: x int64 [N, context], y the same one token later.

    At level "byte" the tokens are the UTF-8 bytes that the train split uses (about a hundred of 256), at level "word"
    its `vocabulary` - 1 most frequent words, numbers, punctuation marks and line ends (`vocabulary` is 2000 by default,
    and for this level only). At both levels id 0 is every other token.
    """
    owner = f"data set {name!r}"
    options = _options(owner, level, context, vocabulary)
    tokens = {split: (words if level == "word" else octets)(content) for split, content in texts.items()}
    ids = number(tokens["train"], options.get("vocabulary", 257))
    parts = {split: _windows(owner, split, [ids.get(token, 0) for token in tokens[split]], context) for split in tokens}
    sizes = ", ".join(f"{len(parts[split])} {split}" for split in parts)
    return Dataset(
        name=name,
        task="language",
        num_classes=len(ids) + 1,
        train=parts["train"],
        validation=parts["validation"],
        test=parts["test"],
        description=f"{source}: {sizes} windows of {context} {level}s, {len(ids) + 1} kinds of {level}.",
        options={"level": level, **options},
    )


def refuse_tokenizer(name: str, tokenizer: str | None) -> None:
    """Raise UsageError for a tokenizer at a level that does not use one."""
    if tokenizer is not None:
        raise UsageError(f"data set {name!r}: tokenizer={tokenizer!r} belongs to level='bpe'; leave it out, or say so")


def words(text: str) -> list[str]:
    """The words, numbers, runs of one punctuation mark, line ends and paragraph ends of a text, without blanks."""
    return [match.group() for match in _WORD.finditer(text)]


def octets(text: str) -> list[str]:
    """The UTF-8 bytes of a text, as characters of code 0..255."""
    return list(text.encode().decode("latin-1"))


def number(tokens: Sequence[str], size: int) -> dict[str, int]:
    """{token: id}: ids 1..size-1 for the most frequent tokens, ties in alphabetical order; 0 is for unknown ones."""
    frequency = Counter(tokens)
    ranked = sorted(frequency, key=lambda token: (-frequency[token], token))
    return {token: i for i, token in enumerate(ranked[: size - 1], start=1)}


def _options(owner: str, level: str, context: int, vocabulary: int | None) -> Mapping[str, int]:
    """Check the options; the numbers among them that this level uses."""
    choose(owner, "level", level, ("byte", "word"))
    whole(owner, "context", context)
    if level == "word":
        size = VOCABULARY if vocabulary is None else vocabulary
        whole(owner, "vocabulary", size, least=2)
        return {"context": context, "vocabulary": size}
    if vocabulary is not None:
        raise UsageError(
            f"{owner}: vocabulary={vocabulary!r} belongs to level='word'; leave it out at level='byte', "
            "whose vocabulary is the bytes that the train split uses"
        )
    return {"context": context}


def _windows(owner: str, name: str, ids: Sequence[int], context: int) -> Split:
    """Cut a split's token ids into windows; y needs one token more than x."""
    num = (len(ids) - 1) // context
    if num < 1:
        raise UsageError(
            f"{owner}: context={context} is too long for split {name!r} of {len(ids)} tokens; "
            f"take a context of at most {len(ids) - 1}"
        )
    stream = torch.tensor(ids[: num * context + 1], dtype=torch.int64)
    return Split(stream[:-1].view(num, context).clone(), stream[1:].view(num, context).clone())


def _files(folder: Path, split: str) -> list[Path]:
    for pattern in FILES[split]:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    raise UsageError(
        f"data set 'text': the {split} split is not in {folder.absolute()}, which needs {' or '.join(FILES[split])}; "
        "put a text of your own there, or say where it is, or what comes out of "
        f"{WIKITEXT} or {LM1B_ARCHIVE}: --data-options.path FOLDER"
    )


def _source(files: Sequence[Path]) -> Source:
    def lines() -> Iterator[Sequence[str]]:
        for file in files:
            with file.open(encoding="utf-8", newline="") as handle:
                while chunk := handle.readlines(CHUNK):
                    yield chunk

    return lines, " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
