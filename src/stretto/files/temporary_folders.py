"""Folders for temporary files. Those of a process that was killed are removed by the next one that starts processes.

Whoever made a folder holds a lock in it, which the operating system gives up with the process: an id may be used again,
a lock is not. What another user owns, or what holds no such lock, is not touched. The lock is a bare descriptor: forks
close what they inherit, and a file object that they drop would close it again, by then perhaps another file.
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
from multiprocessing import util
from pathlib import Path

PREFIX = "stretto-"
MADE = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as tempfile writes names
OWNER = ".owner"  # the file that is locked
BARELY_BEGUN = 3600.0  # seconds until a folder that has not even a lock is taken for one of a killed process


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, which is removed at the end."""
    folder, lock = make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def for_sockets() -> None:
    """Give multiprocessing a folder of ours for the life of this process, unless it has made one already."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        folder, lock = make()
        config["tempdir"] = str(folder)
        util.Finalize(None, remove, args=(folder, lock, os.getpid()), exitpriority=-100)  # as late as its own


def remove(folder: Path, lock: int, owner: int) -> None:
    """Remove a folder, if it is this process's own."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make() -> tuple[Path, int]:
    """A new folder, and the descriptor of the open file that says whose it is."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # somebody has swept it before it had an owner
            file = os.open(folder / OWNER, os.O_WRONLY | os.O_CREAT, 0o644)
            if lock(file) is not False and same(file, folder / OWNER):
                return folder, file
            os.close(file)


def sweep() -> None:
    """Remove the folders of processes that are gone."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(tempfile.gettempdir())):
            if entry.name.startswith(PREFIX) and MADE.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    sweep_one(Path(entry.path), entry.stat(follow_symlinks=False))


def sweep_one(folder: Path, found: os.stat_result) -> None:
    """Remove a folder if it is this user's, and of a process that is gone. Raises OSError where that cannot be."""
    if not (hasattr(os, "getuid") and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()):
        return
    owner = folder / OWNER
    if not owner.exists():
        if time.time() - found.st_mtime > BARELY_BEGUN:
            folder.rmdir()  # not if anything is in it
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
    """Lock a file; whether this process has it now. None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; some network disks
        return None
    return True


def same(file: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())
