"""Where results go: proved before they are computed. A link is followed: results are written to what it leads to.

Files appear whole or not at all, whatever happens while they are written. The checks leave nothing behind. Permissions
do not say whether a disk is mounted read-only, nor count for root: so a file without a name is made where the results
will be.
"""

import contextlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.errors import UsageError


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces `file` at the end of the block.

    If the block raises, the temporary file is removed and `file` stays as it was. Folders are made. Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)  # with the permissions that any new file of this user has
    try:
        yield temporary
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(file: Path, content: str) -> None:
    """Write text in UTF-8; a process that reads the file meanwhile finds the former content, or no file."""
    with replacing(file) as temporary:
        temporary.write_text(content, encoding="utf-8")


BESIDE = f"..{'0' * 16}"  # what the name of a file gets while it is written


def followed(path: Path) -> Path:
    """What a link leads to, there or not; any other path itself, and a link to a device or a pipe."""
    if not os.path.islink(path) or is_special(path):  # noqa: PTH114 - which takes names that are too long, too
        return path
    return Path(os.path.realpath(path))


def is_special(path: Path) -> bool:
    """Whether a path is that of a device, a pipe or a socket."""
    if path.parts[1:2] in (("dev",), ("proc",)) and path.is_absolute() and path.exists():  # /dev/stdout, say
        return True
    with contextlib.suppress(OSError):
        return not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode))
    return False


@contextmanager
def writing(file: Path) -> Iterator[Path]:
    """Yield the path to write a user's file under, which appears whole or not at all.

    One that is there keeps its permissions.
    """
    target = followed(file)
    if is_special(target):
        yield target
        return
    former = target.stat().st_mode if target.exists() else None
    with replacing(target) as temporary:
        yield temporary
        if former is not None:
            temporary.chmod(stat.S_IMODE(former))


def check_file(file: Path) -> None:
    """Raise UsageError if a file cannot be written."""
    refuse(file, "file", lambda: obstacle_to(followed(file)))


def check_folder(folder: Path, option: str = "--out") -> None:
    """Raise UsageError if nothing can be written in a folder, which may have to be made; it comes from an `option`."""
    nameless = folder != Path() and folder.name in ("", "..")  # what a run writes has a name beside its folder's
    refuse(folder, option, lambda: "it has no name" if nameless else obstacle_in(followed(folder)))


def check_replaced(folder: Path, option: str, *roles: str) -> None:
    """Raise UsageError if a folder cannot be made, or replaced, by one that is written beside it.

    `roles` are how those beside it end: that of `run` with the role `partial` is `.run.partial`.
    """
    target = followed(folder)
    refuse(folder, option, lambda: obstacle_to_replacing(target, [f".{target.name}.{role}" for role in roles]))


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path, and what its links lead to, lies in a folder or below it, and is not the folder itself."""
    real, base = os.path.realpath(path), os.path.realpath(folder)
    return real != base and Path(real).is_relative_to(base)


def refuse(path: Path, other: str, reason: Callable[[], str | None]) -> None:
    """Raise UsageError if `reason` returns why nothing can be written to a path; `other` is what to choose instead."""
    try:
        why = reason()
    except OSError as error:
        why = error.strerror or f"{error}"
    if why is not None:
        raise UsageError(f"cannot write to {path}: {why}: choose another {other}")


def obstacle_to(file: Path) -> str | None:
    """Why a file cannot be written, or written over; None if it can."""
    if file.is_dir():
        return "it is a folder"
    if is_special(file):
        if file.is_char_device():
            with file.open("wb", buffering=0) as device:
                device.write(b"")  # fails where it takes nothing, as /dev/full
        return None
    if file.exists() and not os.access(file, os.W_OK):
        return "it may not be written"
    if is_mounted(file):
        return "something is mounted there, which no other file can replace"
    for path in (file, file.with_name(f"{file.name}{BESIDE}")):
        look_at(path)
    return obstacle_in(file.parent)


def obstacle_to_replacing(folder: Path, beside: list[str]) -> str | None:
    """Why a folder cannot be replaced by one that is written under a name `beside` it; None if it can."""
    look_at(folder)
    if not folder.name or folder.name == "..":
        return "it has no name"
    if folder.exists() and not folder.is_dir():
        return "it is a file"
    if is_mounted(folder):
        return "something is mounted there, which no other folder can replace"
    for path in map(folder.with_name, beside):
        look_at(path)
        if path.exists() and not path.is_dir():
            return f"{path} is a file"
    return obstacle_in(folder.parent)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted at a path: a disk, or a folder or file of another place, as containers have them."""
    if os.path.ismount(path):
        return True
    mounts = Path("/proc/self/mountinfo")  # of Linux, which alone binds one of the same disk
    if not mounts.is_file():
        return False
    places = (line.split()[4] for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
    return os.path.realpath(path) in {re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), at) for at in places}


def obstacle_in(folder: Path) -> str | None:
    """Why nothing can be made in a folder, which may have to be made itself; None if it can."""
    look_at(folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    with tempfile.TemporaryFile(dir=nearest):
        return None


def look_at(path: Path) -> None:
    """Raise OSError for a path that no file can have: too long, or with links that lead back to themselves."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
