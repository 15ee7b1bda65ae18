"""A checkpoint's folder: written beside its place, moved there when it is whole, read from where it is then."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.checkpoint.digest import Digest, check, digest_of
from stretto.checkpoint.manifest import Manifest, parse, render
from stretto.checkpoint.tree import empty_tensors, flatten, unflatten
from stretto.errors import UsageError

MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = re.compile(r"manifest\.json|stage-\d+")
StrPath = str | os.PathLike[str]


def write(path: StrPath, states: Iterable[Mapping[str, Any]], manifest: Manifest) -> None:
    """Write all stages and `manifest`, which gets their digests: one process does it all. Raises as the parts do."""
    partial = begin(path)
    try:
        digests = [write_stage(partial, index, state) for index, state in enumerate(states)]
        finish(partial, path, replace(manifest, stages=digests))
    except BaseException:
        discard(path)
        raise


# -- in parts ---------------------------------------------------------------------------------------------------------


def begin(path: StrPath) -> Path:
    """Make an empty folder beside `path`, to write stages into. What an earlier attempt has left is cleared away.

    Raises UsageError if something other than a checkpoint is at `path`, OSError if the folder cannot be made.
    """
    path = _real(path)
    _refuse_to_replace(path)
    with _naming(path):
        for folder in _missing(path.parent):
            folder.mkdir(exist_ok=True)
            _sync(folder.parent)
        discard(path)
        partial = hidden(path, "partial")
        partial.mkdir()
    return partial


def partial_of(path: StrPath) -> Path:
    """The folder that `begin` makes, which others write their stages into."""
    return hidden(_real(path), "partial")


def write_stage(partial: Path, index: int, state: Mapping[str, Any]) -> Digest:
    """Write what `read_stage` is to give back; it is on the disk on return. Only `finish` makes it part of anything.

    Raises UsageError if `state` holds what a checkpoint cannot, OSError if there is no room for it.
    """
    from stretto.checkpoint.tensors import save_tensors

    folder = stage_folder(partial, index)
    try:
        tree, tensors = flatten(state)
    except UsageError as error:
        raise UsageError(f"stage {index}: {error}") from None
    with _naming(folder):
        folder.mkdir()
        save_tensors(folder, tensors)
        _write_text(folder / STATE, json.dumps(tree))
        _sync(folder)
        return digest_of(folder)


def finish(partial: Path, path: StrPath, manifest: Manifest) -> None:
    """Put what was written in `partial` at `path`: there is a whole checkpoint before, after and in between."""
    path = _real(path)
    wanted = {stage_folder(partial, index) for index in range(len(manifest.stages))}
    assert wanted <= set(partial.iterdir()), f"{partial} does not hold the {len(wanted)} stages of the manifest"
    former = hidden(path, "former")
    with _naming(path):
        _write_text(partial / MANIFEST, render(manifest))
        _sync(partial)
        if path.exists():
            path.rename(former)
        partial.rename(path)
        _sync(path.parent)
        if former.exists():
            shutil.rmtree(former)


def discard(path: StrPath) -> None:
    """Leave at `path` what was there before `begin`, if `finish` has not ended, and nothing beside it."""
    path = _real(path)
    partial, former = hidden(path, "partial"), hidden(path, "former")
    if _complete(former) and not _complete(path):
        if path.exists():
            shutil.rmtree(path)
        former.rename(path)
    for folder in (partial, former):
        if folder.exists():
            shutil.rmtree(folder)


def read_manifest(path: StrPath) -> Manifest:
    """What the checkpoint at `path` says of itself. Raises UsageError if there is none, or none that can be read."""
    folder = _find(path)
    file = folder / MANIFEST
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise UsageError(f"{file} is damaged: it is no file")
        content = file.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a whole checkpoint: {MANIFEST} is missing") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    return parse(content, file)


def read_stage(path: StrPath, index: int) -> dict[str, Any]:
    """The state that `write_stage` got. Raises UsageError if a file of the stage is not as it was written."""
    from stretto.checkpoint.tensors import load_tensors

    digests = read_manifest(path).stages
    if not 0 <= index < len(digests):
        raise UsageError(f"{path} holds {len(digests)} stages: it has no stage {index}")
    folder = stage_folder(_find(path), index)
    check(folder, digests[index])
    try:
        tree = json.loads((folder / STATE).read_bytes())
        if not (isinstance(tree, dict) and "dict" in tree):
            raise UsageError(f"{folder / STATE} is no state of a stage")
        tensors = empty_tensors(tree)
        load_tensors(folder, tensors)
        state: dict[str, Any] = unflatten(tree, tensors)
    except Exception as error:
        raise UsageError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    return state


def verify(path: StrPath, *, sizes_only: bool = False) -> None:
    """Raise UsageError, naming the file and what is wrong with it, if the checkpoint at `path` is not whole."""
    manifest, folder = read_manifest(path), _find(path)
    for index, digest in enumerate(manifest.stages):
        check(stage_folder(folder, index), digest, sizes_only=sizes_only)


# -- places -----------------------------------------------------------------------------------------------------------


def stage_folder(folder: Path, index: int) -> Path:
    """Where a stage's files are in a checkpoint."""
    return folder / f"stage-{index}"


def hidden(path: Path, role: str) -> Path:
    """The name beside `path` of what is not a checkpoint yet, or no more."""
    return path.with_name(f".{path.name}.{role}")


def _find(path: StrPath) -> Path:
    path = Path(path)
    if not _real(path).name:
        raise UsageError(f"{path} is the root of all folders and no checkpoint: name the folder that save wrote")
    former = hidden(_real(path), "former")
    if _complete(former) and not _complete(path):  # killed between two renames
        return former
    if not path.exists():
        raise UsageError(f"no checkpoint at {path}")
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a checkpoint but a file: checkpoints are folders. Earlier versions of Stretto wrote single "
            "files; load such a one with the version that wrote it"
        )
    return path


def _refuse_to_replace(path: Path) -> None:
    if not path.name:
        raise UsageError(f"{path} is the root of all folders: name a folder for the checkpoint")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, and a checkpoint a folder: remove it, or save under another name")
    other = [entry.name for entry in path.iterdir() if not PARTS.fullmatch(entry.name)] if path.exists() else []
    if other:
        raise UsageError(
            f"{path} is a folder that holds {sorted(other)[0]!r}, which is no part of a checkpoint, and saving would "
            "replace all of it: save under another name"
        )


def _real(path: StrPath) -> Path:
    return Path(os.path.realpath(path))  # what a link points to is replaced, not the link


def _complete(folder: Path) -> bool:
    return (folder / MANIFEST).exists()  # written last, and only removed with the folder


def _missing(folder: Path) -> list[Path]:
    return [each for each in reversed([folder, *folder.parents]) if not each.exists()]


# -- the disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"the checkpoint could not be written: {error.strerror}; one that was there before still is"
        raise OSError(error.errno, why, str(path)) from error


def _write_text(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
