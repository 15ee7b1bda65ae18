"""A checkpoint's folder: written beside its path, renamed to it when complete, and read from there."""

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

from stretto.checkpoint.manifest import (
    REPLICA,
    TREE,
    Contents,
    Digest,
    Manifest,
    check,
    contents_of,
    digest_of,
    parse,
    render,
)
from stretto.checkpoint.tree import empty_tensors, flatten, unflatten
from stretto.errors import UsageError
from stretto.options.checks import flag, is_whole, mapping, of_kind, refuse, shown, whole
from stretto.options.checks import path as check_path

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
    """Write a checkpoint of all stages from one process; `manifest` gets the stages' digests.

    `others` are the states of the same stages in replicas 1, 2, ... Raises as `begin` and `write_stage` do.
    """
    if not isinstance(states, Iterable) or isinstance(states, Mapping | Tensor):
        refuse("states", states, "a list of the stages' states")
    of_kind("manifest", manifest, Manifest, "a stretto.checkpoint.Manifest")
    partial = begin(path)
    try:
        digests = []
        for index, (state, *replica_states) in enumerate(zip(states, *others, strict=True)):
            first = contents(index, state) if replica_states else {}
            digest = dict(write_stage(partial, index, state))
            for replica, replica_state in enumerate(replica_states, start=1):
                digest |= write_stage(partial, index, replica_state, replica=replica, first=first)
            digests.append(digest)
        finish(partial, path, replace(manifest, stages=digests))
    except BaseException:
        discard(path)
        raise


# -- in parts ---------------------------------------------------------------------------------------------------------


def begin(path: StrPath) -> Path:
    """Make an empty folder beside `path`, to write stages into, and return it. Removes an earlier, unfinished one.

    Raises UsageError if something other than a checkpoint is at `path`, OSError if the folder cannot be made.
    """
    path = _real(path)
    _refuse_to_replace(path)
    with _write_errors(path):
        for folder in [each for each in reversed(path.parents) if not each.exists()]:
            folder.mkdir(exist_ok=True)
            _sync(folder.parent)
        discard(path)
        partial = hidden(path, "partial")
        partial.mkdir()
    return partial


def partial_of(path: StrPath) -> Path:
    """The folder that `begin(path)` makes, into which all workers write their stages."""
    return hidden(_real(path), "partial")


def contents(index: int, state: Mapping[str, Any]) -> Contents:
    """The hashes of a stage's state, which `write_stage` takes for other replicas. Raises as `write_stage` does."""
    return contents_of(*_flattened(index, state))


def write_stage(
    partial: Path, index: int, state: Mapping[str, Any], *, replica: int = 0, first: Contents | None = None
) -> Digest:
    """Write the state of a stage into `partial`, and return the digests of its files, which are on disk by then.

    Another replica than the first writes into a folder of its own, and only what differs from `first`, the contents of
    the first replica; nothing if both are equal. Raises UsageError if `state` holds an object that a checkpoint cannot
    hold, OSError if the files cannot be written.
    """
    from stretto.checkpoint.tensors import save_tensors

    of_kind("partial", partial, Path, "the folder that begin returned")
    whole("replica", replica)
    tree, tensors = _flattened(index, state)
    if first is not None:
        hashes = contents_of(tree, tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if first.get(name) != hashes[name]}
        if not tensors and first[TREE] == hashes[TREE]:
            return {}
    stage = stage_folder(partial, index)
    folder = replica_folder(stage, replica)
    with _write_errors(folder):
        for path in dict.fromkeys((stage, folder)):
            path.mkdir(exist_ok=path is stage)  # another replica may have made the stage's folder
        save_tensors(folder, tensors)
        _write_text(folder / STATE, tree)
        for path in dict.fromkeys((folder, stage)):
            _sync(path)
        return {(folder / name).relative_to(stage).as_posix(): digest for name, digest in digest_of(folder).items()}


def _flattened(index: int, state: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    whole("index", index)
    mapping("state", state, "a dict of tensors, numbers, text, lists and dicts")
    try:
        tree, tensors = flatten(state)
    except UsageError as error:
        raise UsageError(f"stage {index}: {error}") from None
    return json.dumps(tree), tensors


def finish(partial: Path, path: StrPath, manifest: Manifest) -> None:
    """Write the manifest into `partial` and rename it to `path`. At every moment a complete checkpoint can be read.

    Raises OSError if the files cannot be written or renamed.
    """
    path = _real(path)
    stages = {stage_folder(partial, index) for index in range(len(manifest.stages))}
    assert stages <= set(partial.iterdir()), f"{partial} does not hold the {len(stages)} stages of the manifest"
    former = hidden(path, "former")
    with _write_errors(path):
        _write_text(partial / MANIFEST, render(manifest))
        _sync(partial)
        if path.exists():
            path.rename(former)
        partial.rename(path)
        _sync(path.parent)
        if former.exists():
            shutil.rmtree(former)


def discard(path: StrPath) -> None:
    """Restore the checkpoint that was at `path` before `begin`, unless `finish` has ended, and remove partial files."""
    path = _real(path)
    partial, former = hidden(path, "partial"), hidden(path, "former")
    if _complete(former) and not _complete(path):
        if path.exists():
            shutil.rmtree(path)
        former.rename(path)
    for folder in (partial, former):
        if folder.exists():
            shutil.rmtree(folder)


def exists(path: StrPath) -> bool:
    """Whether something at `path` is to be read as a checkpoint, complete or damaged; an empty folder is not."""
    path = _real(path)
    if _complete(hidden(path, "former")):
        return True
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def read_manifest(path: StrPath) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises UsageError if there is no checkpoint, or it cannot be read."""
    folder = _find(path)
    file = folder / MANIFEST
    try:
        if file.exists() and not file.is_file():  # reading a pipe would block
            raise UsageError(f"{file} is damaged: it is no regular file")
        content = file.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a whole checkpoint: {MANIFEST} is missing") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    return parse(content, file)


def read_stage(path: StrPath, index: int, replica: int = 0) -> dict[str, Any]:
    """The state of a stage in a replica, as given to `write_stage`. Raises UsageError if a file of it is damaged."""
    from stretto.checkpoint.tensors import load_tensors, names_in

    manifest = read_manifest(path)
    whole("index", index)
    whole("replica", replica)
    if not 0 <= index < len(manifest.stages):
        raise UsageError(f"{path} holds {len(manifest.stages)} stages: it has no stage {index}")
    if not 0 <= replica < manifest.replicas:
        raise UsageError(f"{path} holds {manifest.replicas} replicas of each stage: it has no replica {replica}")
    stage, digest = stage_folder(_find(path), index), manifest.stages[index]
    folder = replica_folder(stage, replica)
    if not _files_of(folder, stage, digest):
        folder = stage  # this replica's state equals the first one's
    check(stage, _files_of(folder, stage, digest))
    try:
        tree = json.loads((folder / STATE).read_bytes())
        if not (isinstance(tree, dict) and "dict" in tree):
            raise UsageError(f"{folder / STATE} is no state of a stage")
        tensors = empty_tensors(tree)
        names = names_in(folder)
        load_tensors(folder, {name: tensor for name, tensor in tensors.items() if name in names})
        shared = {name: tensor for name, tensor in tensors.items() if name not in names}
        if shared:
            check(stage, _files_of(stage, stage, digest))
            load_tensors(stage, shared)
        state: dict[str, Any] = unflatten(tree, tensors)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    return state


def _files_of(folder: Path, stage: Path, digest: Digest) -> Digest:
    # The digests of a stage's files in `folder`, the stage's own or a replica's. `check` refuses names outside them.
    def parent(name: str) -> Path:
        replica = name.rpartition("/")[0]
        return stage / replica if REPLICA.fullmatch(replica) else stage

    return {name: file for name, file in digest.items() if parent(name) == folder}


def verify(path: StrPath, *, sizes_only: bool = False) -> None:
    """Raise UsageError, naming the file and its damage, if the checkpoint at `path` is not complete and unchanged.

    With `sizes_only` the contents of files are not read.
    """
    flag("sizes_only", sizes_only)
    manifest, folder = read_manifest(path), _find(path)
    for index, digest in enumerate(manifest.stages):
        check(stage_folder(folder, index), digest, sizes_only=sizes_only)


# -- places -----------------------------------------------------------------------------------------------------------


def stage_folder(folder: Path, index: int) -> Path:
    """The folder of a stage's files in a checkpoint."""
    return folder / f"stage-{index}"


def replica_folder(stage: Path, replica: int) -> Path:
    """The folder of a replica's own files of a stage; the stage's folder for replica 0."""
    return stage / f"replica-{replica}" if replica else stage


def hidden(path: Path, role: str) -> Path:
    """The hidden path beside a checkpoint for its role: partial, former or removed."""
    if not path.name:
        raise UsageError(f"{path} is the root of all folders: name a folder for the checkpoint")
    return path.with_name(f".{path.name}.{role}")


def _find(path: StrPath) -> Path:
    check_path("path", path, "the path of a checkpoint, such as 'runs/one'")
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
            "files; load such a file with the version that wrote it"
        )
    return path


def _refuse_to_replace(path: Path) -> None:
    if not path.name:
        raise UsageError(f"{path} is the root of all folders: name a folder for the checkpoint")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, and a checkpoint a folder: remove it, or save under another name")
    foreign = [entry.name for entry in path.iterdir() if not PARTS.fullmatch(entry.name)] if path.exists() else []
    if foreign:
        raise UsageError(
            f"{path} is a folder that holds {sorted(foreign)[0]!r}, which is no part of a checkpoint, and saving would "
            "replace all of it: save under another name"
        )


def _real(path: StrPath) -> Path:
    check_path("path", path, "the path of a checkpoint, such as 'runs/one'")
    return Path(os.path.realpath(path))  # the target of a link is replaced, not the link


def _complete(folder: Path) -> bool:
    return (folder / MANIFEST).exists()  # written last, and only removed with the folder


# -- the disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the checkpoint could not be written: {error.strerror}; one that was there before still is"
        raise OSError(error.errno, message, str(path)) from error


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


STEP = re.compile(r"step-(\d+)|\.step-(\d+)\.former")


def newest(folder: StrPath) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint (None if there is none), and a message for each newer one that is damaged.

    Also a message for each checkpoint that was never finished. Reads checkpoints from the highest number down to the
    result.
    """
    check_path("folder", folder)
    folder = Path(folder)
    complaints = [f"{path} was never finished" for path in _leftovers(folder, "partial")]
    for path in _steps(folder):
        try:
            verify(path)
        except UsageError as error:
            complaints.append(str(error))
        else:
            return path, complaints
    return None, complaints


def prune(folder: StrPath, keep: int = 2) -> None:
    """Remove all checkpoints older than the `keep` newest complete ones, and the files of unfinished ones.

    A checkpoint counts as complete if all its files have the right sizes: contents are not read. Do not call it while a
    checkpoint is being written. Raises UsageError for `keep` below 1.
    """
    if not is_whole(keep) or keep < 1:
        raise UsageError(f"keep={shown(keep)}: at least one checkpoint must be kept")
    check_path("folder", folder)
    folder = Path(folder)
    for leftover in [*_leftovers(folder, "removed"), *_leftovers(folder, "partial")]:
        shutil.rmtree(leftover)
    num_kept = 0
    for path in _steps(folder):
        if num_kept == keep:
            _remove(path)
        elif _looks_complete(path):
            num_kept += 1


def _steps(folder: Path) -> list[Path]:
    """The paths of all checkpoints, highest number first, also of those that only exist as `.step-<n>.former`."""
    matches = [STEP.fullmatch(path.name) for path in folder.iterdir()] if folder.exists() else []
    names = {f"step-{match[1] or match[2]}" for match in matches if match}
    return [folder / name for name in sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True)]


def _leftovers(folder: Path, role: str) -> list[Path]:
    return sorted(folder.glob(f".step-*.{role}"))


def _looks_complete(path: Path) -> bool:
    try:
        verify(path, sizes_only=True)
    except UsageError:
        return False
    return True


def _remove(path: Path) -> None:
    # Renamed first: a half removed folder must not look like a damaged checkpoint.
    removed = hidden(path, "removed")
    for folder in (path, hidden(path, "former")):
        if folder.exists():
            folder.rename(removed)
            shutil.rmtree(removed)
