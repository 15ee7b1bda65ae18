"""Data sets saved on disk by Hugging Face's `datasets` (`save_to_disk`): labelled pictures, translations, or text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from stretto.data.dataset import Dataset, Split
from stretto.data.pictures import Pictures, random_crop
from stretto.data.text import SPLITS, Level, Source, language, refuse_tokenizer, tokenized
from stretto.data.translation import UNKNOWN, Pair, translation
from stretto.errors import UsageError
from stretto.options.named import choose, whole

ROWS = 1000  # of text that are read at a time


def saved(
    *,
    path: str = "data/saved",
    side: int = 224,
    augment: bool = True,
    level: Level | Literal["bpe"] = "byte",
    context: int = 64,
    vocabulary: int | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    """The splits train, validation and test in the folder `path`; their columns decide what the task is.

    With an image and a class label: pictures of `side` x `side`, random crops in training unless `augment` is False.
    With a translation: pairs of sentences from its first language to the second, cut after `context` words, with at
    most `vocabulary` tokens. Otherwise: the first column of text, with the options of data set 'text'.
    """
    stored = _read(Path(path))
    features = stored["train"].features
    kinds = {type(feature).__name__: column for column, feature in reversed(features.items())}
    name = f"What is saved in {path}"
    if "Image" in kinds and "ClassLabel" in kinds:
        made = _pictures(stored, kinds["Image"], kinds["ClassLabel"], name, side, augment=augment)
    elif "Translation" in kinds:
        made = _pairs(stored, kinds["Translation"], name, context, vocabulary)
    else:
        column = next((key for key, feature in features.items() if getattr(feature, "dtype", None) == "string"), None)
        if column is None:
            raise UsageError(
                f"data set 'saved': {path} has the columns {', '.join(features)}; it needs an Image and a ClassLabel, "
                "a Translation, or text"
            )
        choose("data set 'saved'", "level", level, ("byte", "word", "bpe"))
        if level == "bpe":
            made = tokenized(
                "saved",
                {split: _source(stored[split], column) for split in SPLITS},
                Path(path) / ".tokens",
                name,
                context=context,
                vocabulary=vocabulary,
                tokenizer=tokenizer,
            )
        else:
            refuse_tokenizer("saved", tokenizer)
            texts = {split: "\n".join(stored[split][column]) for split in SPLITS}
            made = language("saved", texts, name, level=level, context=context, vocabulary=vocabulary)
    return replace(made, options={"path": path, **made.options})


def _read(folder: Path) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise UsageError(
            "data set 'saved' needs the package datasets, which is not installed: pip install datasets, or "
            '"stretto[saved]"'
        ) from error
    remedy = "datasets.DatasetDict({'train': ..., 'validation': ..., 'test': ...}).save_to_disk(FOLDER) writes one"
    if not folder.is_dir():
        raise UsageError(
            f"data set 'saved': {folder.absolute()} is not there; {remedy}, for example of datasets.load_dataset("
            "'Salesforce/wikitext', 'wikitext-103-raw-v1'); say where it is: --data-options.path FOLDER"
        )
    try:
        stored = load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise UsageError(f"data set 'saved': {folder.absolute()} holds no data set: {remedy}") from error
    missing = [split for split in SPLITS if not isinstance(stored, dict) or split not in stored]
    if missing:
        raise UsageError(f"data set 'saved': {folder.absolute()} lacks {', '.join(missing)}: {remedy}")
    return stored


def _pictures(stored: Any, image: str, label: str, source: str, side: int, *, augment: bool) -> Dataset:
    whole("data set 'saved'", "side", side)
    names = stored["train"].features[label].names

    def split_of(rows: Any, *, augmented: bool = False) -> Split:
        pictures = Pictures(lambda row: rows[row][image], range(len(rows)), side)
        return Split(pictures, torch.tensor(rows[label][:]), random_crop if augmented else None)

    sizes = ", ".join(f"{len(stored[split])} {split}" for split in SPLITS)
    return Dataset(
        name="saved",
        task="classification",
        num_classes=len(names),
        train=split_of(stored["train"], augmented=augment),
        validation=split_of(stored["validation"]),
        test=split_of(stored["test"]),
        description=f"{source}: {sizes} pictures of {len(names)} classes, {side} x {side}.",
        options={"side": side, "augment": augment},
    )


def _pairs(stored: Any, column: str, source: str, context: int, vocabulary: int | None) -> Dataset:
    whole("data set 'saved'", "context", context)
    if vocabulary is not None:
        whole("data set 'saved'", "vocabulary", vocabulary, least=UNKNOWN + 2)
    source_language, target_language = stored["train"].features[column].languages[:2]

    def pairs(rows: Any) -> list[Pair]:
        return [
            (pair[source_language].split()[:context], pair[target_language].split()[:context]) for pair in rows[column]
        ]

    options = {"context": context, "vocabulary": vocabulary}
    return translation(
        "saved", {split: pairs(stored[split]) for split in SPLITS}, source, options, vocabulary=vocabulary
    )


def _source(rows: Any, column: str) -> Source:
    def lines() -> Iterator[Sequence[str]]:
        for batch in rows.iter(batch_size=ROWS):
            yield [f"{line}\n" for line in batch[column]]

    return lines, f"{rows._fingerprint} {column}"
