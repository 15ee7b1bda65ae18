"""What every verb shares: where results are written, and what is printed."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from stretto.errors import UsageError
from stretto.settings.command_line import FLAG

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.settings.runs import Settings
    from stretto.tracing import Recording
    from stretto.tracing.run_phases import RunPhase


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a command writes its results, and what it prints."""

    out: Path | None = None
    """Folder for the results; named after the settings unless said otherwise."""
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


def console(*, stderr: bool = False) -> "Console":
    """A rich console on stdout or stderr, whatever these are when it is called."""
    from rich.console import Console

    return Console(file=sys.stderr if stderr else sys.stdout, soft_wrap=False, highlight=False)


def print_json(content: Any) -> None:
    """Print one JSON object on stdout. Raises ValueError for nan and infinity, which JSON lacks."""
    stdout = getattr(sys.stdout, "document", sys.stdout)
    print(json.dumps(content, indent=1, allow_nan=False), file=stdout, flush=True)


class Aside:
    """What stands for stdout under --json: it writes to stderr. `document` is the real one."""

    def __init__(self, document: TextIO) -> None:
        self.document = document

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def prints_aside(wanted: bool) -> Iterator[None]:
    """If `wanted`, all but `print_json` prints on stderr in this block: users' functions, C code, started processes."""
    stdout = sys.stdout
    if not wanted or stdout is None or sys.stderr is None:
        yield
        return
    stdout.flush()
    own = stdout is sys.__stdout__
    document = os.fdopen(os.dup(stdout.fileno()), "w", encoding="utf-8") if own else stdout
    sys.stdout = Aside(document)
    if own:
        os.dup2(sys.stderr.fileno(), stdout.fileno())
    try:
        yield
    finally:
        sys.stdout = stdout
        if own:
            os.dup2(document.fileno(), stdout.fileno())
            document.close()


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table in characters: each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def write(file: Path, content: str) -> None:
    """Write text into a file, in a folder that is made if need be. Raises UsageError if that cannot be."""
    with writing_to(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def write_trace(
    file: Path, recordings: Sequence["Recording"], phases: "Mapping[str, Sequence[RunPhase]] | None" = None
) -> None:
    """Write recordings as a trace for Perfetto. Raises UsageError if that cannot be."""
    from stretto.tracing import perfetto

    with writing_to(file):
        perfetto.write(recordings, file, phases)


def check_file(file: Path) -> None:
    """Raise UsageError if a file cannot be written, before what is to be in it is computed. Leaves nothing."""
    refuse(file, "file", lambda: obstacle_to(file) if file.exists() else obstacle_in(file.parent))


def check_folder(folder: Path) -> None:
    """Raise UsageError if a folder for results cannot be made or written. Leaves nothing."""
    if os.path.isfile(folder):  # noqa: PTH113 - which takes names that are too long, too
        raise UsageError(f"--out {folder} is a file: name a folder")
    nameless = folder != Path() and folder.name in ("", "..")  # what a run writes has a name beside its folder's
    refuse(folder, "--out", lambda: "it has no name" if nameless else obstacle_in(folder))


def refuse(path: Path, other: str, reason: Callable[[], str | None]) -> None:
    """Raise UsageError if `reason` returns why nothing can be written to a path; `other` is what to choose instead."""
    try:
        why = reason()
    except OSError as error:
        why = error.strerror or f"{error}"
    if why is not None:
        raise UsageError(f"cannot write to {path}: {why}: choose another {other}")


def obstacle_to(file: Path) -> str | None:
    """Why something that is there cannot be written over; None if it can."""
    if file.is_dir():
        return "it is a folder"
    return None if os.access(file, os.W_OK) else "it may not be written"


def obstacle_in(folder: Path) -> str | None:
    """Why nothing can be made in a folder, which may have to be made itself; None if it can."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    with tempfile.TemporaryFile(dir=nearest):  # permissions say nothing of disks that are mounted read-only
        return None


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
        from stretto.report.settings import as_toml

        print(as_toml(settings.to_show()))
