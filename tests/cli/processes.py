"""Commands as real processes, and what becomes of all that they start."""

import functools
import os
import sys
import tempfile
import time
from pathlib import Path

from runtime.nursery import Forked


def start(words, folder, *, launcher=("-m", "stretto"), server=True):
    (folder / "scratch").mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": short(folder / "scratch")}
    return Forked([sys.executable, *launcher, *words], environment, folder, session=True, server=server)


def short(folder):
    """A short name of a folder: sockets have little room for theirs."""
    link = Path(tempfile.mkdtemp(dir=links())) / "t"
    link.symlink_to(folder)
    return str(link)


@functools.cache
def links():
    return tempfile.mkdtemp(prefix="links-")  # it goes with all that tests leave (leftovers.py)


def descendants(pid):
    """The processes that a process has started, and theirs."""
    children = parenthood()
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return sorted(found)


def forks(pid):
    """The workers of a command, in order: forks of a process that it has started."""
    children = parenthood()
    workers = [worker for child in children.get(pid, []) for worker in children.get(child, [])]
    return sorted(workers, key=started_at)


def started_at(pid):
    """When a process was started, in clock ticks, and its number: numbers begin again at 1 after the largest."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]), pid


def parenthood():
    """Which processes each process has started."""
    children = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    return children


def gone(pids, seconds=20):
    """Whether all have ended within that time."""
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pids):
    """The addresses on which these processes listen, as /proc/net writes them."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(str(entry.readlink()))
            except OSError:
                continue
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def left(folder):
    """What a command has left in its folder for temporary files; torch has a cache there, for its user's next time."""
    return sorted(path.name for path in (folder / "scratch").iterdir() if not path.name.startswith("torchinductor_"))
