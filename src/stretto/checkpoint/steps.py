"""The checkpoints of a run: `step-<n>` in one folder."""

import re
import shutil
from pathlib import Path

from stretto.checkpoint.folder import StrPath, hidden, verify
from stretto.errors import UsageError

STEP = re.compile(r"step-(\d+)|\.step-(\d+)\.former")


def newest(folder: StrPath) -> tuple[Path | None, list[str]]:
    """The checkpoint of the highest number that is whole, and what is to be said of those that are not.

    Goes down from the highest and reads no further than it must: all that is newer than the result is named.
    """
    folder = Path(folder)
    complaints = [f"{each} was never finished" for each in _leftovers(folder, "partial")]
    for path in _steps(folder):
        try:
            verify(path)
        except UsageError as error:
            complaints.append(str(error))
        else:
            return path, complaints
    return None, complaints


def prune(folder: StrPath, keep: int = 2) -> None:
    """Remove what is older than the `keep` newest checkpoints that are whole, and what attempts have left behind.

    Whole is what has all its files in their sizes: contents are not read. Not while one is being written.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: at least one checkpoint must be kept")
    folder = Path(folder)
    for each in [*_leftovers(folder, "removed"), *_leftovers(folder, "partial")]:
        shutil.rmtree(each)
    kept = 0
    for path in _steps(folder):
        if kept == keep:
            _remove(path)
        elif _looks_whole(path):
            kept += 1


def _steps(folder: Path) -> list[Path]:
    """The paths of all checkpoints, highest number first, also of those that are there only as the former."""
    found = [STEP.fullmatch(each.name) for each in folder.iterdir()] if folder.exists() else []
    names = {f"step-{match[1] or match[2]}" for match in found if match}
    return [folder / name for name in sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True)]


def _leftovers(folder: Path, role: str) -> list[Path]:
    return sorted(folder.glob(f".step-*.{role}"))


def _looks_whole(path: Path) -> bool:
    try:
        verify(path, sizes_only=True)
    except UsageError:
        return False
    return True


def _remove(path: Path) -> None:
    # By another name first: what is half removed must not look like a damaged checkpoint.
    removed = hidden(path, "removed")
    for place in (path, hidden(path, "former")):
        if place.exists():
            place.rename(removed)
            shutil.rmtree(removed)
