"""Temporary folders: nothing stays, not even of a process that was killed, and nobody else's is touched."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stretto.system import temporary_folders

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks")

OWNER = """
import sys
from stretto.system import temporary_folders
temporary_folders.for_sockets()
with temporary_folders.scratch() as folder:
    (folder / "inner").mkdir()
    (folder / "inner" / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def start():
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_a_process_that_ends_leaves_nothing(tmp_path):
    process, folder = start()
    assert (folder / "inner" / "file").exists()
    assert len(list(tmp_path.iterdir())) == 2
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_leaves_is_swept(tmp_path):
    (killed, _), (living, kept) = start(), start()
    killed.kill()
    killed.communicate()
    assert len(list(tmp_path.iterdir())) == 4
    temporary_folders.sweep()
    assert len(list(tmp_path.iterdir())) == 2
    assert (kept / "inner" / "file").exists()
    living.communicate()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".owner").touch()
    (tmp_path / "stretto-archived").mkdir()  # looks like ours, but was never locked
    (tmp_path / "stretto-archived" / "weights").touch()
    (tmp_path / "stretto-symbolic").symlink_to(tmp_path / "data")
    (tmp_path / "stretto-fresh_00").mkdir()  # somebody is about to lock it
    (tmp_path / "stretto-old_0000").mkdir()
    os.utime(tmp_path / "stretto-archived", (0, 0))
    os.utime(tmp_path / "stretto-old_0000", (0, 0))
    temporary_folders.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {
        "data", "stretto-archived", "stretto-symbolic", "stretto-fresh_00",
    }  # fmt: skip
    assert (tmp_path / "data" / ".owner").exists()
    other = tmp_path / "stretto-of_other"
    other.mkdir()
    (other / ".owner").touch()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    temporary_folders.sweep()
    assert other.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary_folders.sweep()
    assert not other.exists()


def test_one_swept_before_it_was_locked_is_made_anew(tmp_path, monkeypatch):
    """The sweeper may come between the making of a folder and its lock."""
    made, mkdtemp = [], tempfile.mkdtemp

    def swept(prefix):
        made.append(Path(mkdtemp(prefix=prefix)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    with temporary_folders.scratch() as folder:
        assert folder == made[1]


FORGETS = """
import gc, os, sys
from multiprocessing import util
from stretto.system import temporary_folders
temporary_folders.for_sockets()
child = os.fork()
if child == 0:
    os.closerange(3, 50)
    others = [os.open(sys.executable, os.O_RDONLY) for _ in range(47)]
    util._finalizer_registry.clear()  # as multiprocessing's forks begin
    gc.collect()
    os._exit(sum(not os.path.exists(f"/dev/fd/{other}") for other in others))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_that_forgets_it_closes_no_other_file(tmp_path):
    ended = subprocess.run([sys.executable, "-c", FORGETS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
