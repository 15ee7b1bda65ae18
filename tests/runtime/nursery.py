"""Processes that are forked from one that has imported torch, which takes a fresh one seconds.

`python nursery.py` is the one: it has a single thread, has computed nothing, and forks a process for each line that it
reads. Such a process runs a script, a module or code as python would. All have the same hash seed.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from unittest import mock

import costs
import missing_extras
from stretto.system import fork_server

IMPORTED = (
    *fork_server.NEEDED,
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.fx",
    "stretto.trainer.trainer",
    "stretto.trainer.distributed",
    "stretto.parallel.operator",
    "stretto.parallel.space",
    "stretto.collectives",
    "hypothesis",
    "pytest",
    "stretto.runtime.launch",
    "stretto.study",
)

TESTS = str(Path(__file__).parents[1])
NEW_NETWORK = 0x40000000  # CLONE_NEWNET in <linux/sched.h>


class Forked:
    """One of these processes, with as much of subprocess.Popen as tests use. What it says is kept in files."""

    def __init__(self, command, environment, folder=".", *, session=False, network=None, server=True, whole=False):
        """With a fork `server` of Python, as a fork, too; `whole` if it takes the interpreter apart when it ends.

        Taking torch apart takes longer than most of what such a process does.
        """
        assert command[0] == sys.executable, "what is forked is this python"
        self.returncode = None
        self._folder = tempfile.TemporaryDirectory()
        self._place = Path(self._folder.name)
        os.mkfifo(self._place / "status")
        self._status = os.open(self._place / "status", os.O_RDWR)
        request = {"words": command[1:], "environment": environment, "place": self._folder.name,
                   "folder": str(Path(folder).absolute()), "session": session, "network": network,
                   "server": server, "whole": whole}  # fmt: skip
        costs.count("processes")
        nursery().stdin.write(json.dumps(request).encode() + b"\n")
        nursery().stdin.flush()
        self.pid = self._read()

    def _read(self):
        return int.from_bytes(os.read(self._status, 4), "little", signed=True)

    def poll(self):
        """Its exit status, once it has one."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = self._read()
        return self.returncode

    def wait(self, timeout=None):
        """Its exit status. Raises TimeoutExpired."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.poll()

    def kill(self):
        """End it, if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number):
        """Nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is not told yet
                os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """What it said on stdout and stderr; once."""
        self.wait(timeout)
        said = tuple((self._place / name).read_text() for name in ("out", "err"))
        os.close(self._status)
        self._folder.cleanup()
        return said


@functools.cache
def nursery():
    """The one process, which is started with the first request, and reads them from its stdin."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": fork_server.QUIET["TORCH_CPP_LOG_LEVEL"],  # read by torch once, when it is imported
        "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop(costs.FOLDER, None)  # its forks have it back from the process that asks for them
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )
    atexit.register(process.communicate)
    return process


def close():
    """Let the nursery end: nothing more can come. It waits for the processes that it has forked."""
    if nursery.cache_info().currsize:
        nursery().stdin.close()


def serve():
    """Fork two processes for each request: one returns with it, the other tells of its id and of its end.

    Returns None when no more can come.
    """
    while line := sys.stdin.buffer.readline():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            continue
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        with (Path(request["place"]) / "status").open("wb", buffering=0) as status:
            status.write(child.to_bytes(4, "little", signed=True))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            status.write(code.to_bytes(4, "little", signed=True))
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def forked(_, command, kept):
    """Python's own fork server, or its resource tracker, as a fork of this process, too."""
    child = os.fork()
    if child == 0:
        sys.modules.pop("stretto.system.fork_server_preload", None)  # a fresh one would not have it yet
        first = 3
        for number in sorted(kept):
            os.closerange(first, number)
            first = number + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        warnings._processoptions([each for each in os.environ.get("PYTHONWARNINGS", "").split(",") if each])
        try:
            exec(command[-1], {})
        except SystemExit:
            pass
        except BaseException:  # noqa: BLE001 (it ends here: what is below it on the stack is its parent's)
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return child


def become(request):
    """Be the process that was asked for, until it ends."""
    if request["network"] is not None:
        enter(request["network"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the nursery's own: what it has found out is forgotten
    os.chdir(request["folder"])
    if request["session"]:
        os.setsid()
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        os.dup2(os.open(Path(request["place"]) / name, flags | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = open(0)  # noqa: SIM115 (what the former one has read ahead is for others)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job has not
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    sys.argv = request["words"]
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", forked):
        if request["server"]:
            fork_server.prepare()  # before there are threads
    if sys.argv[0] == "-m":
        sys.path[0] = request["folder"]
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        sys.path[0] = request["folder"]
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def enter(name):
    """Have the network of a namespace that `ip netns add` made, as `ip netns exec` would."""
    with Path(f"/var/run/netns/{name}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into the network {name}")


def leave(status=0):
    """End as python does, but for taking the interpreter and torch apart."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def to_its_end(request):
    """Be that process, and end with its status."""
    try:
        become(request)
    except SystemExit as end:
        if not (end.code is None or isinstance(end.code, int)):
            print(end.code, file=sys.stderr)
        leave(0 if end.code is None else end.code & 255 if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001 (python tells of any)
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave()


if __name__ == "__main__":
    for name in IMPORTED:
        __import__(name)
    assert len(list(Path("/proc/self/task").glob("*"))) <= 1, "a thread would be missing in a fork"
    sys.path.remove(TESTS)  # no fork finds what is there unless it is asked to
    costs.count_processes()
    costs.count_steps()
    missing_extras.note_lacks()
    gc.freeze()  # a fork that ends looks at these no more
    wanted = serve()
    if wanted is not None:
        (become if wanted["whole"] else to_its_end)(wanted)
