"""A checkpoint's folder: written beside its place, moved there when it is whole, read from where it is then."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto.checkpoint.digest import REPLICA, Digest, check, digest_of
from stretto.checkpoint.manifest import Manifest, parse, render
from stretto.checkpoint.state_hashes import TREE, Contents, contents_of
from stretto.checkpoint.tree import empty_tensors, flatten, unflatten
from stretto.errors import UsageError

MANIFEST = "manifest.json"
STATE = "state.json"
PARTS = re.compile(r"manifest\.json|stage-\d+")
StrPath = str | os.PathLike[str]


def write(
    path: StrPath,
    states: Iterable[Mapping[str, Any]],
    manifest: Manifest,
    others: Sequence[Iterable[Mapping[str, Any]]] = (),
) -> None:
    """Write all stages and `manifest`, which gets their digests: one process does it all. Raises as the parts do.

    `others` are the states of the same stages in replicas 1, 2, ...
    """
    partial = begin(path)
    try:
        digests = []
        for index, (state, *own) in enumerate(zip(states, *others, strict=True)):
            first = contents(index, state) if own else {}
            digest = dict(write_stage(partial, index, state))
            for replica, other in enumerate(own, start=1):
                digest |= write_stage(partial, index, other, replica=replica, first=first)
            digests.append(digest)
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


def contents(index: int, state: Mapping[str, Any]) -> Contents:
    """What a stage's state consists of: given to `write_stage` for other replicas. Raises as `write_stage` does."""
    return contents_of(*_flattened(index, state))


def write_stage(
    partial: Path, index: int, state: Mapping[str, Any], *, replica: int = 0, first: Contents | None = None
) -> Digest:
    """Write what `read_stage` is to give back; it is on the disk on return. Only `finish` makes it part of anything.

    Of another replica than the first one what is not among the `first` one's contents is written, in a folder of its
    own; nothing if it is all the same. Raises UsageError if `state` holds what a checkpoint cannot, OSError if there is
    no room for it.
    """
    from stretto.checkpoint.tensors import save_tensors

    tree, tensors = _flattened(index, state)
    if first is not None:
        own = contents_of(tree, tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if first.get(name) != own[name]}
        if not tensors and first[TREE] == own[TREE]:
            return {}
    whole = stage_folder(partial, index)
    folder = replica_folder(whole, replica)
    with _naming(folder):
        for each in dict.fromkeys((whole, folder)):
            each.mkdir(exist_ok=each is whole)  # another replica may be first
        save_tensors(folder, tensors)
        _write_text(folder / STATE, tree)
        for each in dict.fromkeys((folder, whole)):
            _sync(each)
        return {(folder / name).relative_to(whole).as_posix(): file for name, file in digest_of(folder).items()}


def _flattened(index: int, state: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    try:
        tree, tensors = flatten(state)
    except UsageError as error:
        raise UsageError(f"stage {index}: {error}") from None
    return json.dumps(tree), tensors


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


def read_stage(path: StrPath, index: int, replica: int = 0) -> dict[str, Any]:
    """The state that `write_stage` got. Raises UsageError if a file of the stage is not as it was written."""
    from stretto.checkpoint.tensors import load_tensors, names_in

    manifest = read_manifest(path)
    if not 0 <= index < len(manifest.stages):
        raise UsageError(f"{path} holds {len(manifest.stages)} stages: it has no stage {index}")
    if not 0 <= replica < manifest.replicas:
        raise UsageError(f"{path} holds {manifest.replicas} replicas of each stage: it has no replica {replica}")
    whole, digest = stage_folder(_find(path), index), manifest.stages[index]
    folder = replica_folder(whole, replica)
    if not _files_of(folder, whole, digest):
        folder = whole  # this replica's state is that of the first one
    _check_own(folder, whole, digest)
    try:
        tree = json.loads((folder / STATE).read_bytes())
        if not (isinstance(tree, dict) and "dict" in tree):
            raise UsageError(f"{folder / STATE} is no state of a stage")
        tensors = empty_tensors(tree)
        own = names_in(folder)
        load_tensors(folder, {name: tensor for name, tensor in tensors.items() if name in own})
        shared = {name: tensor for name, tensor in tensors.items() if name not in own}
        if shared:
            _check_own(whole, whole, digest)
            load_tensors(whole, shared)
        state: dict[str, Any] = unflatten(tree, tensors)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    return state


def _files_of(folder: Path, whole: Path, digest: Digest) -> Digest:
    # Those of a stage's files that one replica has for itself; `check` refuses names that lead anywhere else.
    def place(name: str) -> Path:
        own = name.rpartition("/")[0]
        return whole / own if REPLICA.fullmatch(own) else whole

    return {name: file for name, file in digest.items() if place(name) == folder}


def _check_own(folder: Path, whole: Path, digest: Digest) -> None:
    check(whole, _files_of(folder, whole, digest))


def verify(path: StrPath, *, sizes_only: bool = False) -> None:
    """Raise UsageError, naming the file and what is wrong with it, if the checkpoint at `path` is not whole."""
    manifest, folder = read_manifest(path), _find(path)
    for index, digest in enumerate(manifest.stages):
        check(stage_folder(folder, index), digest, sizes_only=sizes_only)


# -- places -----------------------------------------------------------------------------------------------------------


def stage_folder(folder: Path, index: int) -> Path:
    """Where a stage's files are in a checkpoint."""
    return folder / f"stage-{index}"


def replica_folder(stage: Path, replica: int) -> Path:
    """Where those files of a stage are that a replica has for itself; the first one's are the stage's."""
    return stage / f"replica-{replica}" if replica else stage


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
