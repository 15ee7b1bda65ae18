"""What a checkpoint says of itself in manifest.json."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import stretto
from stretto.checkpoint.digest import Digest, FileDigest
from stretto.checkpoint.tree import flatten, unflatten
from stretto.errors import UsageError

FORMAT = 3  # 1 was a single file, 2 had one replica's state only
READS = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was trained, how far, and what the files of each stage must look like.

    `losses` are the minibatches' that `step` may still return, by their number: one for each micro-batch. `extra` is
    the caller's: where its data stands, states of random generators (as bytes), counts. It holds what a stage's state
    may, except tensors. Where several processes had a part of each stage's weights, `stages` are `parts` times as many:
    those of a stage follow each other. `sync` says how `replicas` of the stages stayed together: None in format 2.
    """

    method: str
    seed: int
    precision: str | None
    entered: int  # minibatches
    losses: Mapping[int, Sequence[float]] = field(default_factory=dict)
    stages: Sequence[Digest] = ()
    parts: int = 1
    replicas: int = 1
    sync: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    stretto: str = stretto.__version__
    torch: str = str(torch.__version__)


def render(manifest: Manifest) -> str:
    """The text of manifest.json. Raises UsageError if `extra` holds what it cannot."""
    content = {"format": FORMAT, **vars(manifest), "num_stages": len(manifest.stages)}
    content["extra"], tensors = flatten(dict(manifest.extra))
    if tensors:
        raise UsageError(f"extra={{...}} of a checkpoint cannot hold the tensor {next(iter(tensors))}: give numbers")
    content["stages"] = [dict(digest) for digest in manifest.stages]
    content["losses"] = {str(n): [float(loss) for loss in losses] for n, losses in manifest.losses.items()}
    return json.dumps({**content, "crc32": _crc32(content)}, indent=1)


def parse(text: bytes, file: Path) -> Manifest:
    """What `render` made the content of `file` of. Raises UsageError if it did not, or another version did."""
    try:
        content = json.loads(text)
        found, number = content.pop("crc32"), content.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if found != _crc32({"format": number, **content}):
        raise UsageError(f"{file} is damaged: its CRC-32 is not {found}")
    if number not in READS:
        made_by, reads = f"version {content.get('stretto')} of Stretto", " and ".join(map(str, READS))
        raise UsageError(f"{file} is of format {number}, written by {made_by}: this version reads formats {reads}")
    try:
        return _manifest(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is none that Stretto has written: {type(error).__name__}: {error}") from error


def _manifest(content: dict[str, Any]) -> Manifest:
    # Its sum is right: whatever is wrong here has been written so.
    stages = content["stages"]
    if content.pop("num_stages") != len(stages):
        raise ValueError(f"{len(stages)} stages, of another number of them")
    content["extra"] = unflatten(content["extra"], {})
    content["stages"] = [{name: FileDigest(*each) for name, each in digest.items()} for digest in stages]
    content["losses"] = {int(n): [float(loss) for loss in losses] for n, losses in content["losses"].items()}
    made = Manifest(**content)
    counts = (("entered", made.entered, 0), ("parts", made.parts, 1), ("replicas", made.replicas, 1))
    for name, value, least in (("seed", made.seed, None), *counts):
        if type(value) is not int or (least is not None and value < least):
            raise ValueError(f"{name} is {value!r}")
    if len(stages) % made.parts or not isinstance(made.extra, dict):
        raise ValueError(f"{len(stages)} stages in {made.parts} parts, extra is a {type(made.extra).__name__}")
    if not isinstance(made.sync, str | None):
        raise TypeError(f"sync is {made.sync!r}")
    return made


def _crc32(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
