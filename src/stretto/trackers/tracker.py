"""What an experiment tracker is to Stretto: options by which it is opened for a run, and an open run's methods.

`TrackedRun` is one run in all the trackers that were asked for: one that fails is told once and dropped.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from stretto.errors import UsageError
from stretto.options.checks import of_fields, whole
from stretto.options.named import choice_text
from stretto.system.destinations import check_folder, is_below
from stretto.system.path_names import in_path

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


FLUSH = 1.0  # seconds between two writes, at least


class TrackedRun:
    """The writer of a run: there is one, whatever the number of processes that train.

    `tell` is called with a sentence where a tracker fails; training goes on without it.
    """

    def __init__(self, trackers: Sequence[Tracker], run: RunDescription, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._open: dict[str, TrackerRun] = {}
        self._rows: dict[int, dict[str, float]] = {}
        self._written_at = time.monotonic()
        for tracker in trackers:
            self._attempt(tracker.name, lambda tracker=tracker: self._begin(tracker, run))  # type: ignore[misc]

    def _begin(self, tracker: Tracker, run: RunDescription) -> None:
        self._open[tracker.name] = tracker.open(run)

    @property
    def ids(self) -> Mapping[str, str]:
        """What this run is called in each tracker: a checkpoint keeps it, so that a resumed run goes on there."""
        return {name: run.id for name, run in self._open.items()}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values under a step; they are passed on once a second."""
        self._rows.setdefault(step, {}).update(values)
        if time.monotonic() > self._written_at + FLUSH:
            self.flush()

    def flush(self) -> None:
        """Pass on all rows that are waiting."""
        rows: list[Row] = sorted(self._rows.items())
        self._rows, self._written_at = {}, time.monotonic()
        if rows:
            self._each(lambda run: run.write(rows))

    def add_file(self, path: Path) -> None:
        """Keep a copy of a file with the run."""
        self._each(lambda run: run.add_file(path))

    def close(self, *, finished: bool) -> None:
        """Pass on what is left, and end the run."""
        self.flush()
        self._each(lambda run: run.close(finished=finished))
        self._open = {}

    def _each(self, call: Callable[[TrackerRun], None]) -> None:
        for name, run in list(self._open.items()):
            self._attempt(name, lambda run=run: call(run))  # type: ignore[misc]

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, it is told and training goes on
            self._open.pop(name, None)
            self._tell(
                f"tracker {name} failed ({type(error).__name__}: {error}): it gets nothing more of this run; training "
                "goes on"
            )
