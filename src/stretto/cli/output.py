"""What every verb shares: where results are written, and what is printed."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

from stretto.errors import UsageError
from stretto.settings.command_line import FLAG
from stretto.system.destinations import writing

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.settings.runs import Settings
    from stretto.tracing import Recording
    from stretto.tracing.run_phases import RunPhase


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a command writes its results, and what it prints."""

    out: Path | None = None
    """Folder for the results; by default named after the settings."""
    json: Annotated[bool, FLAG] = False
    """Print one JSON object on stdout, nothing else."""
    quiet: Annotated[bool, FLAG] = False
    """No progress, no table."""
    dry_run: Annotated[bool, FLAG] = False
    """Print the resolved configuration as TOML and stop."""

    @property
    def silent(self) -> bool:
        """Whether nothing is printed for people."""
        return self.quiet or self.json

    def say(self, text: Any) -> None:
        """Print for people, on stdout; nothing with --quiet or --json."""
        if not self.silent:
            console().print(text)


def console() -> "Console":
    """A rich console on stdout, whatever that is when it is called."""
    from rich.console import Console

    return Console(file=sys.stdout, soft_wrap=False, highlight=False)


def print_json(content: Any) -> None:
    """Print one JSON object on stdout. Raises ValueError for nan and infinity, which JSON lacks."""
    print(json.dumps(content, indent=1, allow_nan=False), file=_document.get() or sys.stdout, flush=True)


class Aside:
    """What stands for stdout under --json: it writes to stderr."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


_document: ContextVar[TextIO | None] = ContextVar("document", default=None)  # stdout, while others print aside


@contextmanager
def prints_aside(wanted: bool) -> Iterator[None]:
    """If `wanted`, all but `print_json` prints on stderr in this block: users' functions, C code, started processes."""
    stdout = sys.stdout
    if not wanted or stdout is None or sys.stderr is None:
        yield
        return
    stdout.flush()
    own = stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    document = os.fdopen(os.dup(stdout.fileno()), "w", encoding="utf-8") if own else stdout
    token = _document.set(document)
    try:
        sys.stdout = cast("TextIO", Aside())
        if own:
            os.dup2(sys.stderr.fileno(), stdout.fileno())
        yield
    finally:
        sys.stdout = stdout
        _document.reset(token)
        if own:
            os.dup2(document.fileno(), stdout.fileno())
            document.close()


def terminal_columns() -> int | None:
    """The width of the terminal that stdout goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table in characters: each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def write(file: Path, content: str) -> None:
    """Write text into a file, in a folder that is made if need be. Raises UsageError if that cannot be."""
    with writing_to(file), writing(file) as path:
        path.write_text(content, encoding="utf-8")


def write_trace(
    file: Path, recordings: Sequence["Recording"], phases: "Mapping[str, Sequence[RunPhase]] | None" = None
) -> None:
    """Write recordings as a trace for Perfetto. Raises UsageError if that cannot be."""
    from stretto.tracing import perfetto

    with writing_to(file):
        perfetto.write(recordings, file, phases)


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder that may be somebody else's. Raises UsageError for a link: it leads anywhere."""
    if (folder / name).is_symlink():
        raise UsageError(
            f"{folder / name} is a link, and a folder may come from others: delete it, or give --trace FILE"
        )
    return folder / name


@contextmanager
def writing_to(file: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write a file into errors that say what to do."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {file}: {error.strerror}: choose another file") from error


def print_settings(settings: "Settings", output: Output) -> None:
    """The resolved configuration, in a form that can be given back as a file."""
    if output.json:
        print_json(settings.to_show())
    else:
        from stretto.report.page import as_toml

        print(as_toml(settings.to_show()))
