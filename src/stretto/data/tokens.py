"""Text of any size as tokens of a byte-pair encoding, in files that are read when a batch needs them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.data.dataset import Dataset, Split
from stretto.errors import UsageError
from stretto.files.whole_files import replacing
from stretto.options.named import whole

VOCABULARY = 4096
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
    name: str, sources: Mapping[str, Source], cache: Path, source: str, *, context: int,
    vocabulary: int | None, tokenizer: str | None,
) -> Dataset:  # fmt: skip
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
    size = VOCABULARY if vocabulary is None else vocabulary
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
