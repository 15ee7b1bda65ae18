"""Translations from the user's files: one file for each language and split, a sentence in each line."""

from pathlib import Path

from stretto.data.dataset import Dataset
from stretto.data.text import SPLITS
from stretto.data.translation import UNKNOWN, Pair, translation
from stretto.errors import UsageError
from stretto.files.path_names import in_path
from stretto.options.named import whole

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
