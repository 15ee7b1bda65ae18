"""Errors of a study's folder: a full disk, no permission, another process at work."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from stretto.errors import StrettoError, UsageError
from stretto.report.units import bytes_held

FREE_BYTES = 64 * 2**20  # on the disk before a study starts, at least


class FullDiskError(StrettoError):
    """There is no room on the disk: the results of further runs would be lost."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn OSErrors of writing into FullDiskError and UsageError, which say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullDiskError(
                f"no room on the disk for {folder}: free some and start the same command again; finished runs are kept"
            ) from error
        raise UsageError(f"cannot write to {folder}: {error.strerror}: choose another --out") from error


def refuse_full(folder: Path, what: str, needed: float) -> None:
    """Raise FullDiskError where the disk of a folder, which may have to be made, has no room for `what`, some bytes."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise FullDiskError(
            f"{folder} has {bytes_held(free)} free, {what} needs {bytes_held(needed)}: free some, or choose an --out "
            "elsewhere"
        )


def locked(path: Path, folder: Path, *, exclusive: bool = True) -> TextIO:
    """Open a file and lock it until it is closed or the process ends.

    If it is not `exclusive`, other processes may hold such a lock as well. Raises UsageError, which names `folder`, if
    another process has locked it.
    """
    file = path.open("a", encoding="utf-8")
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except ImportError:  # Windows has no such lock
        pass
    except BlockingIOError as error:
        file.close()
        raise UsageError(
            f"another process is at work on {folder}: wait until it has ended, or choose another --out"
        ) from error
    return file
