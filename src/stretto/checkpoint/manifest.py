"""The manifest of a checkpoint, the content of manifest.json, with the sizes and CRC-32 of its files: they show damage.

A CRC finds every burst of up to 32 wrong bits, and all but one in 4e9 of other damages. It guards against faulty disks
and copies, not against forgers. It reads 500 MB in 0.25 s where SHA-256 takes 1.4 s (one thread, no SHA instructions).
"""

import json
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import stretto
from stretto.checkpoint.tree import flatten, unflatten
from stretto.errors import UsageError
from stretto.nn.state_check import hash_of, hash_of_bytes
from stretto.system.path_names import in_path


class FileDigest(NamedTuple):
    """A file's size in bytes, and its CRC-32 as eight hexadecimal digits. In JSON a list of the two."""

    size: int
    crc32: str


REPLICA = re.compile(r"replica-[1-9][0-9]*")  # a folder in a stage's folder

Digest = Mapping[str, FileDigest]  # by the file's name, with replica-<n>/ before it in a replica's folder


def digest_of(folder: Path) -> dict[str, FileDigest]:
    """The digests of all files in `folder`, not of those in its folders."""
    files = sorted(file for file in folder.iterdir() if not file.is_dir())
    return {file.name: FileDigest(file.stat().st_size, crc32(file)) for file in files}


def check(folder: Path, digest: Digest, *, sizes_only: bool = False) -> None:
    """Raise UsageError, naming the file and its damage, if a file in `folder` differs from its digest."""
    for name, (size, checksum) in digest.items():
        file = _path_of(folder, name)
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
                raise UsageError(f"{file} is damaged: it is no regular file")
            if status.st_size != size:
                raise UsageError(f"{file} is damaged: it has {status.st_size} bytes and had {size}")
            if not sizes_only and (computed := crc32(file)) != checksum:
                raise UsageError(f"{file} is damaged: its CRC-32 is {computed} and was {checksum}")
        except FileNotFoundError:
            raise UsageError(f"{file} is missing") from None
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error


def _path_of(folder: Path, name: str) -> Path:
    replica, _, file_name = name.rpartition("/")
    if not REPLICA.fullmatch(replica):
        replica, file_name = "", name
    return folder / replica / in_path(file_name, f"{folder}: the name of a file", hidden=True)


def crc32(file: Path) -> str:
    """The CRC-32 of a file's content."""
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


Contents = Mapping[str, str]  # hexadecimal hashes: of the tree under "", of each tensor under its name

TREE = ""  # the tree's key


def contents_of(tree: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The hashes of a flattened state: of its tree, as JSON, and of each tensor's dtype, shape and values."""
    return {TREE: hash_of_bytes(tree.encode()), **{name: hash_of(tensor) for name, tensor in tensors.items()}}


FORMAT = 3  # 1 was a single file, 2 had one replica's state only
READS = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was trained, how far, and the digests of each stage's files.

    `losses`: the losses that `step` has still to return, by the minibatch's number, one for each micro-batch. `extra`
    is the caller's: its place in the data, states of random generators (as bytes), counts. It may hold what a stage's
    state may, except tensors. `stages`: one digest per stage, or `parts` consecutive ones per stage where its weights
    were divided among `parts` processes. `sync` names the strategy of the `replicas` replicas: None in format 2.
    """

    method: str
    seed: int
    precision: str | None
    entered: int  # minibatches that have entered the pipeline
    losses: Mapping[int, Sequence[float]] = field(default_factory=dict)
    stages: Sequence[Digest] = ()
    parts: int = 1
    replicas: int = 1
    sync: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    stretto: str = stretto.__version__
    torch: str = str(torch.__version__)


def render(manifest: Manifest) -> str:
    """The text of manifest.json. Raises UsageError if `extra` holds a tensor, or what no checkpoint can hold."""
    content = {"format": FORMAT, **vars(manifest), "num_stages": len(manifest.stages)}
    content["extra"], tensors = flatten(dict(manifest.extra))
    if tensors:
        raise UsageError(f"extra={{...}} of a checkpoint cannot hold the tensor {next(iter(tensors))}: give numbers")
    content["stages"] = [dict(digest) for digest in manifest.stages]
    content["losses"] = {str(n): [float(loss) for loss in losses] for n, losses in manifest.losses.items()}
    return json.dumps({**content, "crc32": _crc32(content)}, indent=1)


def parse(text: bytes, file: Path) -> Manifest:
    """The manifest from the content of `file`. Raises UsageError if it is damaged, or of an unknown format."""
    try:
        content = json.loads(text)
        checksum, file_format = content.pop("crc32"), content.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if checksum != _crc32({"format": file_format, **content}):
        raise UsageError(f"{file} is damaged: its CRC-32 is not {checksum}")
    if file_format not in READS:
        writer, formats = f"version {content.get('stretto')} of Stretto", " and ".join(map(str, READS))
        raise UsageError(
            f"{file} is of format {file_format}, written by {writer}: this version reads formats {formats}"
        )
    try:
        return _manifest(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} was not written by Stretto: {type(error).__name__}: {error}") from error


def _manifest(content: dict[str, Any]) -> Manifest:
    # The CRC-32 matches, so a wrong value was already wrong when it was written.
    stages, num_stages = content["stages"], content.pop("num_stages")
    if num_stages != len(stages):
        raise ValueError(f"stages has {len(stages)} entries, and num_stages is {num_stages!r}")
    content["extra"] = unflatten(content["extra"], {})
    content["stages"] = [{name: FileDigest(*pair) for name, pair in digest.items()} for digest in stages]
    content["losses"] = {int(n): [float(loss) for loss in losses] for n, losses in content["losses"].items()}
    manifest = Manifest(**content)
    counts = (("entered", manifest.entered, 0), ("parts", manifest.parts, 1), ("replicas", manifest.replicas, 1))
    for name, value, least in (("seed", manifest.seed, None), *counts):
        if type(value) is not int or (least is not None and value < least):
            raise ValueError(f"{name} is {value!r}")
    if len(stages) % manifest.parts or not isinstance(manifest.extra, dict):
        raise ValueError(f"{len(stages)} stages in {manifest.parts} parts, extra is a {type(manifest.extra).__name__}")
    if not isinstance(manifest.sync, str | None):
        raise TypeError(f"sync is {manifest.sync!r}")
    return manifest


def _crc32(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
