"""What tests leave behind: processes, temporary files and listening ports, each with the test after which it was there.

What ends by itself before all tests have is none of it, nor is what this process of pytest keeps for all its tests.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from costs import processes_started

MARK = "STRETTO_TESTS_OF"  # environment variable: the id of the process of pytest that a process descends from
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # until this process ends
CACHES = ("torchinductor_", "links-")  # of torch; short names of the folders of commands (cli/processes.py)
SECONDS = 10  # in which processes that were told to end have ended


class Leftovers:
    """Watches what comes with each test, in this process of pytest; processes and ports where /proc tells of them."""

    def __init__(self):
        self.place = Path(tempfile.mkdtemp(prefix="st-"))
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where it was
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.place)
        os.environ[MARK] = str(os.getpid())
        self.files, self.processes, self.ports, self.descriptors = {}, {}, {}, 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        started = processes_started()
        result = yield
        for path in self.place.iterdir():
            self.files.setdefault(path.name, item.nodeid)
        if sys.platform == "linux":
            if processes_started() > started:
                for pid in descendants():
                    self.processes.setdefault(pid, item.nodeid)
            if (descriptors := sum(1 for _ in Path("/proc/self/fd").iterdir())) > self.descriptors:
                for port in listening(os.getpid()):
                    self.ports.setdefault(port, item.nodeid)
            self.descriptors = descriptors
        return result

    def found(self):
        """A line for each thing that is still there."""
        ports = listening(os.getpid()) if sys.platform == "linux" else []
        said = [f"{self.ports[port]} leaves port {port} listening" for port in ports if port in self.ports]
        until = time.monotonic() + SECONDS
        while (left := self._strangers()) and time.monotonic() < until:
            time.sleep(0.1)
        said += [f"{self.processes[pid]} leaves process {pid}: {words}" for pid, words in left.items()]
        names = [name for name in self.files if (self.place / name).exists() and not is_kept(name)]
        return said + [f"{self.files[name]} leaves {name} in the folder for temporary files" for name in names]

    def _strangers(self):
        # The processes that tests have left, with their command lines.
        commands = {pid: command(pid) for pid in descendants() if pid in self.processes}
        return {pid: words for pid, words in commands.items() if words and not any(each in words for each in KEPT)}

    def clear(self):
        """Nothing is left of the folder once this process has ended: multiprocessing removes its own sockets first."""
        multiprocessing.util.Finalize(None, shutil.rmtree, (self.place,), {"ignore_errors": True}, exitpriority=-200)


def descendants():
    """The living processes, but for this one, that were started with the mark of this one in their environment."""
    found, mark = [], f"{MARK}={os.getpid()}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def command(pid):
    """Its command line; empty once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def is_kept(name):
    """Whether a folder is a cache, or the one of this process for multiprocessing's sockets, which goes with it."""
    own = multiprocessing.current_process()._config.get("tempdir", "")
    return name.startswith(CACHES) or name == Path(own).name


def listening(pid):
    """The ports on which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(entry.readlink()))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
