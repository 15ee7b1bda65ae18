"""The checkpoints of a run: `step-<n>` in one folder."""

import re
import shutil
from pathlib import Path

from stretto.checkpoint.folder import StrPath, hidden, verify
from stretto.errors import UsageError
from stretto.options.checks import is_whole, shown
from stretto.options.checks import path as check_path

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
