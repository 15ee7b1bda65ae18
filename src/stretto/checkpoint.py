"""A trainer's state on disk: whole or not there."""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from stretto.errors import UsageError

FORMAT = 1


def write(path: Path, state: dict[str, Any]) -> None:
    """Write beside the target, then rename: a crash or a full disk leaves the former file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            torch.save({"stretto": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """Read what `write` wrote. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch's reader does not check what it reads
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{path} is not a whole checkpoint of Stretto: {error}") from error
    if not isinstance(state, dict) or state.get("stretto") != FORMAT:
        raise UsageError(f"{path} is not a checkpoint of this version of Stretto (format {FORMAT})")
    return state
