"""Errors that a user's function raises: the line that they come from, and the function's name, for messages."""

import functools
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import shown

STRETTO = f"{Path(__file__).parents[1]}"
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
PACKAGES = ("site-packages", "dist-packages")  # the names of folders into which packages are installed


def error_place(error: BaseException) -> str:
    """File and line of the user's code where an error was raised, or of its call of what raised it; a message's end.

    It is the innermost line outside installed packages; of a function that is in one, the innermost outside torch.
    Empty if only Stretto and torch were at work.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [(Path(frame.filename), frame.lineno) for frame in frames if not frame.filename.startswith("<")]
    foreign = [(file, line) for file, line in places if not (file.is_relative_to(STRETTO) or is_torch(file))]
    own = [(file, line) for file, line in foreign if not is_installed(file)]
    innermost = (own or foreign)[-1:]
    return "".join(f" ({file}:{line})" for file, line in innermost)


@contextmanager
def explained(begin: str, end: str = "", passing: tuple[type[Exception], ...] = (UsageError,)) -> Iterator[None]:
    """In this block, errors of a user's function become UsageError: `begin`, the error and its place, `end`.

    Errors of the kinds in `passing` go through unchanged.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        raise UsageError(f"{begin} {type(error).__name__}: {error}{error_place(error)}{end}") from error


@contextmanager
def exits_told() -> Iterator[None]:
    """In this block, a user's function that calls sys.exit raises UsageError, which names it, instead.

    What Stretto and installed packages do is left alone.
    """
    try:
        yield
    except SystemExit as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        named = [frame.f_code for frame in frames if not frame.f_code.co_filename.startswith("<")]
        codes = [(Path(code.co_filename), code) for code in named]
        foreign = [(file, code) for file, code in codes if not file.is_relative_to(STRETTO)]
        own = [(file, code) for file, code in foreign if not is_installed(file)]
        ours = codes[-1][0].is_relative_to(STRETTO)
        if ours or (not own and error.code not in (0, None)):  # rich, say, whose reader has gone
            raise
        file, code = (own or foreign)[-1]
        raise UsageError(
            f"{file.name}:{code.co_qualname} called sys.exit({error.code!r}){error_place(error)}, which would have "
            "ended the process: let it return, or raise an error that says what is wrong"
        ) from error


def is_torch(file: Path) -> bool:
    """Whether a file is of the torch package."""
    return any(pair in zip(file.parts, file.parts[1:], strict=False) for pair in ((name, "torch") for name in PACKAGES))


def is_installed(file: Path) -> bool:
    """Whether a file is of an installed package or of Python's library."""
    return file.is_relative_to(STANDARD_LIBRARY) or not set(PACKAGES).isdisjoint(file.parts)


def function_name(function: Callable[..., Any]) -> str:
    """The file and the name of a function, "own.py:loss", of a partial one too; other objects as messages show them."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return function.__qualname__ if isinstance(function, type) else shown(function)
    return f"{Path(code.co_filename).name}:{function.__qualname__}"


def called(name: str, value: Callable[..., Any], *arguments: Any, wanted: str) -> Any:
    """Call a user's function with arguments that it must accept; its errors become UsageError."""
    with explained(f"{name}={function_name(value)} failed with", f". Give {wanted}"):
        return value(*arguments)
