"""The fork server and what it forks end with their starter: at once where the system helps, soon where it does not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cli.processes import alive, descendants, gone
from pairwise import in_turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

STARTER = """
import multiprocessing, sys, threading, time
from stretto.system import fork_server
import child

fork_server.NEEDED = ("stretto.system.fork_server_preload", *sys.argv[1].split(","))

def start():
    fork_server.prepare()
    if "endless" not in fork_server.NEEDED:
        multiprocessing.get_context("forkserver").Process(target=child.live, daemon=True).start()
    print("started", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    if sys.argv[2] == "main":
        start()
    threading.Thread(target=start, daemon=True).start()
    time.sleep(1000)
"""
MODULES = {
    "endless": "import pathlib, time\npathlib.Path('begun').touch()\nwhile True:\n    time.sleep(0.01)\n",
    "helpless": "from stretto.system import lifeline\nlifeline.end_with_parent = lambda: None\n",
    "child": "import pathlib, time\nfrom stretto.system import fork_server\n"
    "def live():\n    fork_server.begin()\n    pathlib.Path('begun').touch()\n"
    "    while True:\n        time.sleep(0.01)\n",
}


@pytest.fixture
def run(tmp_path):
    for name, text in {**MODULES, "starter": STARTER}.items():
        (tmp_path / f"{name}.py").write_text(text)
    running, folder = [], tempfile.TemporaryDirectory()  # whoever is killed leaves one in it

    def start(modules, thread):
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": folder.name}
        command = [sys.executable, "starter.py", modules, thread]
        running.append(subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE))
        assert running[-1].stdout.readline() == b"started\n"
        until = time.monotonic() + 30
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < until, "it takes too long"
            time.sleep(0.02)
        return running[-1], descendants(running[-1].pid)

    yield start
    for process in running:
        process.kill()
        process.communicate()
    folder.cleanup()


@pytest.mark.parametrize(
    ("modules", "thread"),
    in_turn(["endless", "helpless,endless", "json", "helpless"], ["main", "other"], rounds=2, slow=1),
)
def test_all_end_with_a_killed_starter(run, modules, thread):
    """Also a server that imports: it used to look only when it was through."""
    process, children = run(modules, thread)
    assert len(children) >= 2  # the tracker of resources and the server
    process.kill()
    process.wait()
    assert gone(children), [Path(f"/proc/{pid}/cmdline").read_text() for pid in children if alive(pid)]


def test_a_stopped_one_ends_too(run):
    process, children = run("json", "main")
    for pid in children[1:]:  # the tracker, which comes first, is Python's own
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert gone(children)


def test_a_fork_ends_with_its_server(run):
    process, children = run("helpless", "other")
    os.kill(children[1], signal.SIGKILL)
    assert gone(children[1:])
    assert process.poll() is None


INTERRUPTED = """
from multiprocessing import forkserver
from stretto.system import fork_server

from child import work

fork_server.NEEDED = ("stretto.system.fork_server_preload",)

def interrupted(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    sent, forkserver.reduction.sendfds = forkserver.reduction.sendfds, interrupted
    try:
        fork_server.start(work)
    except KeyboardInterrupt:
        print("interrupted")
    forkserver.reduction.sendfds = sent
    process, pipe = fork_server.start(work)
    print(pipe.recv())
    process.join()
"""


def test_an_interrupt_as_a_fork_is_asked_for_is_told_by_no_server(tmp_path):
    """A thread of torch's hears the signal though the main thread blocks it, so it may come between any two lines."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    (tmp_path / "child.py").write_text("def work(pipe):\n    pipe.send('done')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "interrupted.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\ndone\n", "")
