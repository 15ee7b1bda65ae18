"""The connections that torch.distributed makes for process groups, so that a process can leave all others at once.

A gloo group closes its connections when nobody refers to it any more, and a trainer that has failed does: without this
others would wait for it until their time is out.
"""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import UsageError

OPEN_FILES = Path("/dev/fd")  # not on every system
RECEIVED = 128  # where tcpi_bytes_received is in <linux/tcp.h>'s tcp_info
SPARE = 16  # descriptors for what else a process opens
OF_GROUP = 4  # descriptors of a gloo group besides its connections (torch 2.13)

Socket = tuple[int, int]  # its file descriptor, and the inode by which it is known to be still the same

_made: set[Socket] = set()  # for the groups of this process that are in use


@contextlib.contextmanager
def made_here() -> Iterator[None]:
    """Connections that are made in here are those of a process group."""
    before = sockets()
    try:
        yield
    finally:
        _made.update(sockets() - before)


def bytes_received() -> int:
    """All that has arrived by these connections so far; 0 where the system does not tell."""
    total = 0
    for number, inode in tuple(_made):
        with contextlib.suppress(OSError, AttributeError):  # it has been closed since; not on Linux
            copy = os.dup(number)
            with socket.socket(fileno=copy) as connection:
                if os.fstat(copy).st_ino == inode:
                    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED + 8)
                    total += int.from_bytes(told[RECEIVED:], sys.byteorder)
    return total


def cut() -> None:
    """Close the connections of all groups that were made, in both directions: whoever waits for this process knows."""
    there = sockets()
    for number, inode in _made:
        if (number, inode) in there:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # one that listens has none: gloo (torch 2.13) aborts if it is shut down
                connection.shutdown(socket.SHUT_RDWR)
    _made.clear()


def refuse_without_room(processes: int) -> None:
    """Raise UsageError if this process may not open what a group of so many processes needs."""
    if not OPEN_FILES.is_dir():
        return
    import resource  # not on every system, either

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    count, needed = len([*OPEN_FILES.iterdir()]) - 1, OF_GROUP + processes - 1  # one is open to list the others
    if count + needed + SPARE > limit:
        raise UsageError(
            f"the limit of open files (ulimit -n) is {limit}, {count} are open, and a process group of {processes} "
            f"processes needs {needed} more, besides {SPARE} for all else: raise it, or close Trainers that are no "
            "longer needed (trainer.close())"
        )


def sockets() -> set[Socket]:
    opened = set()
    for file in OPEN_FILES.iterdir() if OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # the one that lists the others
            about = os.fstat(int(file.name))
            if stat.S_ISSOCK(about.st_mode):
                opened.add((int(file.name), about.st_ino))
    return opened
