"""What can go wrong between a study and its folder: no room, no permission, somebody else at work."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from stretto.errors import StrettoError, UsageError


class FullDiskError(StrettoError):
    """There is no room for results: going on would only lose them."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullDiskError(
                f"no room on the disk for {folder}: free some and start the same command again; finished runs are kept"
            ) from error
        raise UsageError(f"cannot write to {folder}: {error.strerror}: choose another --out") from error


def locked(path: Path, folder: Path, *, alone: bool = True) -> TextIO:
    """Open a file so that nobody else can, while it is open; the operating system forgets it with the process.

    Unless `alone`, others who open it so may. Raises UsageError if another process has it open: `folder` is what that
    one works on.
    """
    file = path.open("a", encoding="utf-8")
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except ImportError:  # Windows has no such lock
        pass
    except BlockingIOError as error:
        file.close()
        raise UsageError(
            f"another process is at work on {folder}: wait until it has ended, or choose another --out"
        ) from error
    return file
