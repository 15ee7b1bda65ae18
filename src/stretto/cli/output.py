"""What every verb shares: where results go, and how much is said."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.settings.runs import Settings
    from stretto.tracing import Recording

FLAG = Parameter(negative="")


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a command speaks."""

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
        """Whether people are not to be told anything."""
        return self.quiet or self.json

    def say(self, text: Any) -> None:
        """Tell people, on stdout."""
        if not self.silent:
            console().print(text)


def console(*, stderr: bool = False) -> "Console":
    """A rich console on the streams as they are now."""
    from rich.console import Console

    return Console(file=sys.stderr if stderr else sys.stdout, soft_wrap=False, highlight=False)


def print_json(content: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(content, indent=1, allow_nan=False))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def write(file: Path, content: str) -> None:
    """Put a file where it was asked for."""
    with writing_to(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def write_trace(file: Path, recordings: Sequence["Recording"]) -> None:
    """Put a trace for Perfetto where it was asked for."""
    from stretto.tracing import perfetto

    with writing_to(file):
        perfetto.write(recordings, file)


def check_file(file: Path) -> None:
    """Raise UsageError if a file cannot be written, before what is to be in it is computed. Leaves nothing."""
    refuse(file, "file", lambda: obstacle_to(file) if file.exists() else obstacle_in(file.parent))


def check_folder(folder: Path) -> None:
    """Raise UsageError if a folder for results cannot be made or written. Leaves nothing."""
    from stretto.errors import UsageError

    if os.path.isfile(folder):  # noqa: PTH113 - which takes names that are too long, too
        raise UsageError(f"--out {folder} is a file: name a folder")
    nameless = folder != Path() and folder.name in ("", "..")  # what a run writes has a name beside its folder's
    refuse(folder, "--out", lambda: "it has no name" if nameless else obstacle_in(folder))


def refuse(path: Path, other: str, reason: Callable[[], str | None]) -> None:
    """Raise UsageError if there is a reason why nothing can be written to a path."""
    from stretto.errors import UsageError

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
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        return f"{there} is a file"
    with tempfile.TemporaryFile(dir=there):  # rights do not tell of disks that are read-only
        return None


@contextmanager
def writing_to(file: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write a file into errors that say what to do."""
    from stretto.errors import UsageError

    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {file}: {error.strerror}: choose another file") from error


def print_settings(settings: "Settings", output: Output) -> None:
    """The resolved configuration, in a form that can be given back as a file."""
    if output.json:
        print_json(settings.to_json())
    else:
        from stretto.report.settings import as_toml

        print(as_toml(settings.to_json()))
