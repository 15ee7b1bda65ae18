"""Folders for temporary files. A killed process's folders are removed by the next one that starts processes.

The process that made a folder holds a lock on a file in it, which the operating system releases when the process ends:
a process id may be used again, a lock is not. A folder of another user, or without such a file, is not touched. The
lock is a bare file descriptor: forks close what they inherit, and a file object that they drop would close it a second
time, when the number may belong to another file.
"""

import contextlib
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import util
from pathlib import Path

from stretto import interrupts

PREFIX = "stretto-"
MADE = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as tempfile writes names
OWNER = ".owner"  # the file that is locked
UNLOCKED = 3600.0  # seconds after which a folder without a lock is taken for one of a killed process


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, which is removed at the end."""
    made: tuple[Path, int] | None = None
    try:
        with interrupts.held():
            made = make()
        yield made[0]
    finally:
        if made is not None:
            shutil.rmtree(made[0], ignore_errors=True)
            os.close(made[1])


def for_sockets() -> None:
    """Give multiprocessing such a folder for its sockets while this process lives, unless it has made one already."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        with interrupts.held():
            mine = (*make(), os.getpid())
            config["tempdir"] = str(mine[0])
            interrupts.before_ending(partial(remove, *mine))
        util.Finalize(None, remove, args=mine, exitpriority=-100)  # as late as that of multiprocessing's own folder


def remove(folder: Path, lock: int, owner: int) -> None:
    """Remove a folder, if it is this process's own."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # closed already, where an interrupt ends what was ending
            os.close(lock)


def make() -> tuple[Path, int]:
    """A new folder, and the descriptor of its locked file."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another process has removed it before it was locked
            file = os.open(folder / OWNER, os.O_WRONLY | os.O_CREAT, 0o644)
            if lock(file) is not False and same(file, folder / OWNER):
                return folder, file
            os.close(file)


def sweep() -> None:
    """Remove the folders of processes that have ended."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(tempfile.gettempdir())):
            if entry.name.startswith(PREFIX) and MADE.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    sweep_one(Path(entry.path), entry.stat(follow_symlinks=False))


def sweep_one(folder: Path, status: os.stat_result) -> None:
    """Remove a folder if it is this user's and its process has ended. Raises OSError if it cannot be removed."""
    if not (hasattr(os, "getuid") and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()):
        return
    owner = folder / OWNER
    if not owner.exists():
        if time.time() - status.st_mtime > UNLOCKED:
            folder.rmdir()  # fails if anything is in it
        return
    with owner.open("r+", encoding="ascii") as file:
        if lock(file.fileno()):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != owner:
                    path.unlink()
            owner.unlink()
            folder.rmdir()


def lock(file: int) -> bool | None:
    """Lock an open file: True if this process has the lock now, False if another has, None if there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; some network disks
        return None
    return True


def same(file: int, path: Path) -> bool:
    """Whether a path still names the open file."""
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())
