"""The command line: reads arguments and files, turns errors into one clear message and an exit status.

0 done, 1 something failed on the way, 2 a user's mistake, 130 interrupted.
"""

import atexit
import contextlib
import errno
import os
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cyclopts import App, CycloptsError, Parameter

from stretto import __version__, interrupts
from stretto.cli.calibrate import calibrate
from stretto.cli.compare import compare
from stretto.cli.diagnose import diagnose
from stretto.cli.doctor import doctor
from stretto.cli.output import Output, prints_aside
from stretto.cli.plan import plan
from stretto.cli.report import inspect, report
from stretto.cli.show import show
from stretto.cli.simulate import simulate
from stretto.cli.toml_file import file_first, parts_of, settings_from_file
from stretto.cli.train import train
from stretto.errors import StrettoError, UsageError
from stretto.options.extras import require
from stretto.options.user_errors import exits_told
from stretto.settings.runs import CompareSettings
from stretto.system.destinations import check_file, check_folder

FILES = ("out", "page", "svg", "csv", "trace")  # options that name a file to write; the out of Output names a folder
NEEDED = {  # the extras that options need
    "trace": "trace",
    "trace_operations": "trace",
    "overlay": "trace",
    "scale": "report",
    "page": "report",
}
NO_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # what no file can be called, or is
OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, interrupts.STATUS


def shown_default(value: Any) -> str | None:
    """A default as `--help` says it; None for a flag that is off, and for an empty list."""
    if value is None or value is False or value in ((), {}):
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


app = App(
    name="stretto",
    default_parameter=Parameter(show_default=shown_default),
    help="Train deep networks on many workers, with or without backpropagation's locks.",
    version=__version__,
    config=settings_from_file,
)
for verb in (compare, train, show, simulate, plan, calibrate, report, inspect, doctor, diagnose):
    app.command(verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        interrupts.take(words)
    try:
        with interrupts.raising():
            status: Any = call(words)
            flush()
    except (CycloptsError, StrettoError) as error:
        code = MISTAKE if isinstance(error, CycloptsError | UsageError) else FAILED
        printed = getattr(error, "said_by", None) is not None  # by another process of this job
        return code if printed else complain(f"{error}", code)
    except BrokenPipeError:  # whoever read stdout has gone; nothing that Python says at its end may fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        message = f"{error.filename or 'the operating system refuses'}: {error.strerror or error}"
        return complain(message, MISTAKE if error.errno in NO_PATH else FAILED)
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        return complain("a path holds a zero character, which no file's name can: leave it out", MISTAKE)
    except KeyboardInterrupt as interrupt:
        interrupts.answered(said=True)
        return complain(f"{interrupt}" or interrupts.meaning(words), INTERRUPTED)
    return status if isinstance(status, int) else OK


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Say a warning of Stretto's as a command says it, without the line of code; others as Python does."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        print(f"stretto: mind: {message}", file=sys.stderr)
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def run_and_exit() -> NoReturn:
    """Run the command of this process's own arguments and end the process, with its exit status.

    Modules are not torn down: with torch that takes up to a second, and beside triton it prints a page on stderr
    ("nanobind: leaked ...") about objects that an interrupted command still holds.
    """
    warnings.showwarning = show_warning
    status = main()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as Python's end does
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # streams that are gone, closed, or were never there
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def call(words: list[str]) -> Any:
    """Parse the words and run the verb. A TOML file may stand anywhere among them; options given as words win."""
    words = file_first(words, lambda: options_of(words))
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    bound.apply_defaults()
    if command is compare:
        selection = bound.arguments["selection"]
        parts = parts_of(bound.arguments["config"], selection.size, selection.part)
        bound.arguments["parts"] = {part: settings_of(words, part) for part in parts}
    check_outputs(bound.arguments)
    check_extras(command, bound.arguments)
    if command is train:
        bound.arguments["command"] = shlex.join(["stretto", *words])
    try:
        with prints_aside(asks_for_json(bound.arguments)), exits_told():
            return command(*bound.args, **bound.kwargs)
    except UsageError as error:
        file = bound.arguments.get("config")
        if file is None:
            raise
        raise UsageError(f"{error} (with the settings in {file})") from error


def asks_for_json(arguments: Mapping[str, Any]) -> bool:
    """Whether --json is given to a verb."""
    return any(
        asks_for_json(vars(value)) if is_dataclass(value) else name == "json" and value is True
        for name, value in arguments.items()
    )


def check_outputs(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError where a verb is to write and cannot: before it computes anything."""
    for name, value in arguments.items():
        if isinstance(value, Output):
            if value.out is not None:
                check_folder(value.out)
        elif is_dataclass(value):
            check_outputs(vars(value))
        elif name in FILES and isinstance(value, Path):
            check_file(value)


def check_extras(command: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise UsageError where a verb will need a package that is not installed: before it computes anything."""
    output = arguments.get("output")
    given = {**arguments, **(vars(output) if is_dataclass(output) else {})}
    if command in (report, inspect):
        require("report", f"stretto {command.__name__} writes a page of charts, which")
    for option, extra in NEEDED.items():
        if given.get(option) not in (None, False):
            require(extra, f"--{option.replace('_', '-')}")


def options_of(words: Sequence[str]) -> list[str]:
    """The options of the verb, those that every verb has included."""
    verb = words[0] if words and words[0] in app and not words[0].startswith("-") else None
    arguments = () if verb is None else app[verb].assemble_argument_collection()
    names = (name for argument in arguments for name in argument.names)
    return ["--help", "--version", *(name for name in names if name.startswith("-"))]


def settings_of(words: list[str], part: str) -> CompareSettings:
    """The settings of a part of a study file, as if it had been asked for alone: the command line wins in each."""
    bound = app.parse_args([*words, "--part", part], exit_on_error=False, print_error=False)[1]
    settings: CompareSettings = bound.arguments.get("settings", CompareSettings())
    return settings


def complain(message: str, status: int) -> int:
    """Print an error on stderr; return the exit status."""
    interrupts.answered(said=True)
    with contextlib.suppress(OSError):
        flush()
    print(f"stretto: {message}", file=sys.stderr)
    return status


def flush() -> None:
    """Find out now, not at Python's end, whether stdout takes what was written; there may be none."""
    if sys.stdout is not None:
        sys.stdout.flush()
