"""What an experiment tracker is to Stretto: options by which it is opened for a run, and an open run's methods."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from stretto.errors import UsageError
from stretto.files.destinations import check_folder, is_below
from stretto.files.path_names import in_path
from stretto.options.checks import of_fields, whole
from stretto.options.named import choice_text

Row = tuple[int, Mapping[str, float]]
"""A step, counted from 1, and what was measured after it."""


@dataclass(frozen=True)
class RunDescription:
    """A run as a tracker is told of it.

    `group` is the study that it belongs to. `settings` are plain data, `schedule` is a drawing as
    text. A run that goes on from a checkpoint has `ids`, {tracker's name: what its run is called there}, and the step
    `since` which it goes on.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = ""
    group: str | None = None
    ids: Mapping[str, str] = field(default_factory=dict)
    since: int = 0

    def __post_init__(self) -> None:
        of_fields("RunDescription: ", self)


class TrackerRun(ABC):
    """One run in a tracker, open. Whatever its methods raise is told once, and costs the run nothing else."""

    id: str
    """What a later process opens this run by."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Add measurements; steps may come in any order."""

    @abstractmethod
    def add_file(self, path: Path) -> None:
        """Keep a copy of a file, such as the report."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """End the run: `finished`, or else failed or interrupted."""


@dataclass(frozen=True, kw_only=True)
class Tracker(ABC):
    """A tracker with its options. `every` says after how many steps rates, norms and memory are measured.

    `package` is what it needs beside Stretto, None for nothing.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    every: int = 50

    def __post_init__(self) -> None:
        of_fields(f"{self.name}: ", self)
        whole(f"{self.name}: every", self.every, 1)

    def __str__(self) -> str:
        return choice_text(self.name, self)

    def require(self, where: str) -> None:
        """Raise UsageError, which says `where` it was asked for, if its package is not installed; imports nothing."""
        package = self.package
        if package is not None and find_spec(package) is None:
            raise UsageError(f"{where}: {self.name} needs {package}, which is not installed: pip install {package}")

    def prepare(self, group: str) -> None:  # noqa: B027 - most trackers have nothing to prepare
        """Do once, before the runs of a study are opened side by side, what they would hinder each other in."""

    @abstractmethod
    def open(self, run: RunDescription) -> TrackerRun:
        """Begin a run, or go on with the one that `run.ids` names."""


@dataclass(frozen=True, kw_only=True)
class LocalTracker(Tracker):
    """A tracker that writes files below `folder`, a folder for each run (and study), and talks to nobody."""

    folder: str | os.PathLike[str] = "logs"

    def require(self, where: str) -> None:
        """Also raise UsageError if nothing can be written in its folder."""
        super().require(where)
        check_folder(Path(self.folder), f"{self.name}(folder=...)")

    def folder_of(self, run: RunDescription) -> Path:
        """The folder of a run: the one that it had before, or else one named after its study and itself.

        Raises UsageError for one that lies elsewhere: what a run is called is in its checkpoint, which is data.
        """
        if self.name not in run.ids:
            parts = [run.name] if run.group is None else [run.group, run.name]
            return Path(self.folder, *(in_path(part, "a run's name") for part in parts))
        former = Path(run.ids[self.name])
        if not is_below(former, Path(self.folder)):
            raise UsageError(
                f"the run was logged to {former}, which is not below folder={self.folder!r}: name the folder above it, "
                f"{self.name}(folder={str(former.parent)!r})"
            )
        return former


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict with dots in its keys; lists as text."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return values


SPLITS = ("train", "validation", "test")
OF_STEPS = ("loss", "lr", "grad_norm", "examples_per_second")


def grouped(key: str) -> str:
    """A value's name in trackers that group by what stands before a slash: "validation_loss" is validation/loss."""
    head, _, rest = key.partition("_")
    if head in SPLITS and rest:
        return f"{head}/{rest}"
    return f"step/{key}" if key.partition("/")[0] in OF_STEPS else f"usage/{key}"
