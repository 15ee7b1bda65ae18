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

FORMAT = 2  # 1 was a single file


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was trained, how far, and what the files of each stage must look like.

    `losses` are the minibatches' that `step` may still return, by their number: one for each micro-batch. `extra` is
    the caller's: where its data stands, states of random generators (as bytes), counts. It holds what a stage's state
    may, except tensors. Where several processes had a part of each stage's weights, `stages` are `parts` times as many:
    those of a stage follow each other.
    """

    method: str
    seed: int
    precision: str | None
    entered: int  # minibatches
    losses: Mapping[int, Sequence[float]] = field(default_factory=dict)
    stages: Sequence[Digest] = ()
    parts: int = 1
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
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if found != _crc32({"format": number, **content}):
        raise UsageError(f"{file} is damaged: its CRC-32 is not {found}")
    if number != FORMAT:
        made_by = f"version {content.get('stretto')} of Stretto"
        raise UsageError(f"{file} is of format {number}, written by {made_by}: this version reads format {FORMAT}")
    assert content.pop("num_stages") == len(content["stages"])
    content["extra"] = unflatten(content["extra"], {})
    content["stages"] = [{name: FileDigest(*each) for name, each in digest.items()} for digest in content["stages"]]
    content["losses"] = {int(n): losses for n, losses in content["losses"].items()}
    return Manifest(**content)


def _crc32(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
