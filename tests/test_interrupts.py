"""Ctrl-C and SIGTERM: none is lost where Python drops what a handler raises, and the first lines hear them."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from stretto import interrupts
from stretto.interrupts import Interrupted, raising
from stretto.system import fork_server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals between processes, and timers")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAYS = ([sys.executable, "-m", "stretto"], [str(Path(sys.executable).with_name("stretto"))])
# found instead of the first package that the command line imports
FIRST_IMPORT = """
import os, signal, time
from pathlib import Path
for name in {names}:
    os.kill(os.getpid(), getattr(signal, name))
Path("went-on").touch()
"""
ENDLESS = 30.0  # seconds in which what must come soon has not come


@pytest.fixture
def command(monkeypatch):
    """This process as a command that has just begun; its handlers are given back."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    monkeypatch.setattr(interrupts, "_command", interrupts._Command())
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    interrupts.take(["train"])
    yield interrupts._command
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


class Kept:
    """What a weak reference may point to."""


def in_weak_reference():
    kept = Kept()
    reference = weakref.ref(kept, lambda _: interrupt())
    del kept
    assert reference() is None


def in_destructor():
    class Last:
        def __del__(self):
            interrupt()

    Last()


def in_bare_except():
    with contextlib.suppress(BaseException):
        interrupt()


@pytest.mark.parametrize("drop", [in_weak_reference, in_destructor, in_bare_except])
def test_one_that_is_dropped_is_raised_again(command, drop, capfd):
    with raising():
        drop()
        with pytest.raises(Interrupted):
            time.sleep(ENDLESS)
        interrupts.answered(said=False)
    assert capfd.readouterr() == ("", "")


def test_one_that_has_become_another_error_ends_the_command(command):
    def convert():
        try:
            interrupt()
        except BaseException as error:
            raise ImportError("a module is missing") from error

    with pytest.raises(Interrupted), raising():
        convert()


def test_one_that_was_dropped_at_the_very_end_ends_the_command(command):
    with pytest.raises(Interrupted), raising():
        in_weak_reference()


@pytest.mark.parametrize("number", SIGNALS)
def test_an_import_is_not_cut_through(command, number, tmp_path, monkeypatch):
    name = f"interrupted_by_{number.name}"
    text = f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(0.1)\nwhole = True\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "LONGEST_IMPORT", ENDLESS)

    def run():
        importlib.import_module(name)
        time.sleep(ENDLESS)

    with raising():
        with pytest.raises(Interrupted):
            run()
        interrupts.answered(said=False)
    assert sys.modules[name].whole


def test_an_import_without_end_is_cut_through(command, tmp_path, monkeypatch):
    (tmp_path / "endless_import.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(signal.SIGINT)})\ntime.sleep({ENDLESS})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "LONGEST_IMPORT", 0.1)
    with pytest.raises(Interrupted), raising():
        importlib.import_module("endless_import")


def test_a_block_that_is_held_comes_to_its_end(command):
    done = []

    def block():
        with interrupts.held():
            interrupt()
            done.append("the block")
        done.append("what follows")

    with pytest.raises(Interrupted), raising():
        block()
    assert done == ["the block"]


def test_the_start_of_the_fork_server_is_not_cut_through(command, monkeypatch):
    """Python tries a folder for temporary files by a file, which it would leave there."""
    tried = []

    def method():
        interrupt()
        tried.append("a folder")
        return "spawn"

    monkeypatch.setattr(fork_server, "method", method)
    with pytest.raises(Interrupted), raising():
        fork_server.prepare()
    assert tried == ["a folder"]


def test_signals_at_nearly_the_same_time_are_one(command, monkeypatch):
    """From a terminal, and from what has started the command: the second would cut through how it ends by the first."""
    monkeypatch.setattr(interrupts, "ONE", ENDLESS)
    with raising():
        with pytest.raises(Interrupted):
            interrupt()
        interrupt(signal.SIGTERM)
        monkeypatch.setattr(interrupts, "ONE", 0)
        with pytest.raises(Interrupted):
            interrupt(signal.SIGTERM)
        interrupts.answered(said=False)


@pytest.mark.parametrize("said", [False, True])
def test_what_is_to_be_left_clean_is_left_clean_and_the_line_is_said_once(command, said, monkeypatch, capfd):
    def leave(status):
        os.kill(os.getpid(), signal.SIGALRM)  # of the timer, which runs where the interrupt had to wait
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    cleaned = []
    interrupts.before_ending(lambda: cleaned.append("a folder"))
    if said:
        interrupts.answered(said=True)
    with pytest.raises(SystemExit) as ended:
        interrupt()
    interrupts.answered(said=True)
    assert (ended.value.code, cleaned) == (130, ["a folder"])
    assert capfd.readouterr().err == ("" if said else "stretto: interrupted\n")


def test_a_study_says_what_is_kept():
    assert interrupts.meaning(["compare", "--quiet"]) == (
        "interrupted; finished runs are kept, the same command makes the others"
    )


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("way", WAYS, ids=["module", "script"])
def test_a_signal_during_the_first_import_of_a_command(tmp_path, way, number):
    found = first_import(tmp_path, way, [number.name])
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "stretto: interrupted\n")
    assert not (tmp_path / "went-on").exists()


def test_a_command_that_ignores_ctrl_c_goes_on_doing_so(tmp_path):
    """As a shell's job in the background does."""
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = first_import(tmp_path, WAYS[0], ["SIGINT"])
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert (tmp_path / "went-on").exists()
    assert "interrupted" not in found.stderr


def first_import(folder, way, names):
    if not Path(way[0]).exists():
        pytest.skip(f"{way[0]} is not installed")
    (folder / "cyclopts.py").write_text(FIRST_IMPORT.format(names=names))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*way, "train"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_library_takes_no_signal_and_a_command_lets_them_end_it_from_its_first_line(tmp_path):
    """Until `stretto.interrupts` is there: Python's own handler would end it with a traceback."""
    code = (
        "import signal, sys\nfor argv in ([''], ['-m']):\n"
        "    sys.argv, sys.orig_argv = argv, ['python', '-m', 'stretto']\n"
        "    sys.modules.pop('stretto', None)\n    import stretto\n"
        "    print(*(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    library, command = found.stdout.splitlines()
    assert "default_int_handler" in library
    assert library.endswith("0")
    assert command == "0 0"
