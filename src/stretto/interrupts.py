"""Ctrl-C and SIGTERM, from the first line of a command to its last: one line, status 130, and none is lost.

While a command imports and reads its arguments, the handler itself prints the line and ends the process. Later there
are processes to end and files to remove: then it raises Interrupted. What a handler raises Python drops where nobody
can catch it (in a destructor, in the callback of a weak reference: each import has one), a bare `except` drops it, too,
and the command would go on. So nothing is raised inside an import, and an Interrupted that ends unanswered is raised
again. Without `take`, which the command line alone calls, nothing here does anything.

Python 3.11 imports `signal`, `contextlib` and `typing` for milliseconds, in which no handler would stand: not here.
"""

import _signal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

STATUS = 130
ONE = 1.0  # seconds within which signals are one: from the terminal, and from what has started this process
SOON = 0.05  # seconds until an interrupt that has to wait, or was dropped, is looked at again
LONGEST_IMPORT = 5.0  # seconds that an import may keep one waiting
IMPORT = "<frozen importlib._bootstrap>"  # the file of Python's functions that import
HAS_TIMER = hasattr(_signal, "setitimer")  # Windows has none: an interrupt is raised at once there, and may be dropped


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM.

    A plain KeyboardInterrupt that has passed through an `exec` of a string (dataclasses have such ones while modules
    are imported) makes `python -m stretto` end by SIGINT, even if it was caught: the exit status would not be 130.
    """

    def __del__(self) -> None:
        if _command.open:
            _command.look_soon()


class _Command:
    """What this process does when it is interrupted; signal handlers have no other place to know it from."""

    def __init__(self) -> None:
        self.taken = False
        self.line = ""
        self.at_once = True  # there is nothing to clean up but what `leftovers` do
        self.leftovers: list[Callable[[], object]] = []
        self.held = 0  # blocks under way that must not be left in the middle
        self.since: float | None = None  # when the last signal came
        self.open = False  # it has come, and nobody has answered it yet
        self.said = False  # the command has printed why it ends

    def hear(self, _: int, frame: "FrameType | None") -> None:
        """Handle a signal that interrupts."""
        now = time.monotonic()
        if self.since is not None and now < self.since + ONE:
            return
        self.since, self.open = now, True
        if HAS_TIMER:
            _signal.signal(_signal.SIGALRM, self.look)
        self.act(frame)

    def look(self, _: int, frame: "FrameType | None") -> None:
        """Handle the timer's signal."""
        if self.open:
            self.act(frame)
        else:
            _signal.setitimer(_signal.ITIMER_REAL, 0)

    def look_soon(self) -> None:
        """Have `look` called soon, and again: such a signal also wakes what the operating system lets wait."""
        if HAS_TIMER:
            _signal.setitimer(_signal.ITIMER_REAL, SOON, SOON)

    def act(self, frame: "FrameType | None") -> None:
        """End the process or raise Interrupted, unless it is a bad moment."""
        if self.held or (not self.at_once and self.imports(frame)):
            self.look_soon()
        elif self.at_once:
            self.end()
        else:
            if HAS_TIMER:
                _signal.setitimer(_signal.ITIMER_REAL, 0)
            raise Interrupted

    def imports(self, frame: "FrameType | None") -> bool:
        """Whether a module is being imported, and may take its time."""
        if not HAS_TIMER or self.since is None or time.monotonic() > self.since + LONGEST_IMPORT:
            return False
        while frame is not None and frame.f_code.co_filename != IMPORT:
            frame = frame.f_back
        return frame is not None

    def end(self) -> None:
        """Print the line, if nothing is said yet, and end the process."""
        self.open, self.since = False, float("inf")  # what comes now finds it ending
        for clean_up in self.leftovers:
            clean_up()
        try:  # noqa: SIM105 - see above
            os.write(2, b"" if self.said else f"{self.line}\n".encode())
        except OSError:  # a stderr that nobody reads
            pass
        os._exit(STATUS)


_command = _Command()


class _Ending:
    """A block in which an interrupt ends the process at once, or one in which it is raised."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._before = True

    def __enter__(self) -> None:
        self._before, _command.at_once = _command.at_once, self._at_once
        if _command.open:
            _command.act(sys._getframe(1))

    def __exit__(self, kind: "type[BaseException] | None", _: BaseException | None, __: "TracebackType | None") -> None:
        _command.at_once = self._before
        if self._before and _command.open and not (kind and issubclass(kind, KeyboardInterrupt)):
            raise Interrupted from None  # it was dropped, or has become another error


class _Held:
    def __enter__(self) -> None:
        _command.held += 1

    def __exit__(self, *_: object) -> None:
        _command.held -= 1
        if _command.open:
            _command.act(sys._getframe(1))


def take(words: "Sequence[str]") -> None:
    """Let Ctrl-C and SIGTERM end this process, a command of these words, at once. Ctrl-C stays ignored where it is."""
    if _command.taken:
        return
    _command.line = f"stretto: {meaning(words)}"
    if _signal.getsignal(_signal.SIGINT) in (_signal.default_int_handler, _signal.SIG_DFL):
        _signal.signal(_signal.SIGINT, _command.hear)
    _signal.signal(_signal.SIGTERM, _command.hear)
    _command.taken = True
    others = sys.unraisablehook

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, Interrupted):  # which is raised again
            others(unraisable)

    sys.unraisablehook = report


def meaning(words: "Sequence[str]") -> str:
    """What it comes to that a command of these words is interrupted, where the command itself says no more."""
    study = "; finished runs are kept, the same command makes the others" if "compare" in words[:1] else ""
    return f"interrupted{study}"


def raising() -> _Ending:
    """A block with much to clean up: an interrupt raises Interrupted, at the block's end at the latest."""
    return _Ending(at_once=False)


def ending_at_once() -> _Ending:
    """A block, within such a one, that leaves nothing to clean up."""
    return _Ending(at_once=True)


def held() -> _Held:
    """A short block that is not interrupted in the middle."""
    return _Held()


def before_ending(clean_up: "Callable[[], object]") -> None:
    """Have this called before the process ends at once."""
    _command.leftovers.append(clean_up)


def interrupt(number: int, frame: "FrameType | None") -> None:
    """A handler for further signals, which act as Ctrl-C does."""
    if not _command.taken:
        raise KeyboardInterrupt
    _command.hear(number, frame)


def received() -> bool:
    """Whether the command has been interrupted, and has not answered."""
    return _command.open


def answered(*, said: bool) -> None:
    """The command ends by what it has `said`, or goes on because it had done its work before."""
    _command.open = False
    if said:
        _command.said, _command.at_once = True, True
    else:
        _command.since = None
