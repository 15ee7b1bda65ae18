"""A study on the disk: which runs it consists of, which are finished, and whose folder it is."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.path_names import in_path
from stretto.report import Record
from stretto.report.heading import Heading
from stretto.settings.runs import CompareSettings, Settings, TrainSettings, known
from stretto.study.disk_errors import FullDiskError, locked, writing
from stretto.study.methods import choose
from stretto.study.process_pool import Task
from stretto.study.store import LOCK, RUN, STUDY, read_run, versions, write_json

ROOM = 64 * 2**20  # bytes that must be free before a study starts


@dataclass(frozen=True)
class Study:
    """A study on the disk: its resolved settings, its runs' folders, and those that are finished.

    `left_out` says why methods are not among those that `all` stood for, `heading` what it is about, if that is known.
    """

    settings: CompareSettings
    out: Path
    tasks: tuple[Task, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    heading: Heading | None = None

    @property
    def pending(self) -> list[Task]:
        """The runs that are not finished; one whose files are damaged is not."""
        return [task for task in self.tasks if record_of(task) is None]

    def records(self) -> tuple[Record, ...]:
        """The finished runs."""
        return tuple(record for task in self.tasks if (record := record_of(task)) is not None)


def record_of(task: Task) -> Record | None:
    """What a finished run came to."""
    try:
        return read_run(task.folder)[1]
    except UsageError:
        return None


def resolve_study(settings: CompareSettings) -> CompareSettings:
    """Resolve the settings and try every method. Raises UsageError for what cannot work."""
    return choose(settings).settings


def open_study(settings: CompareSettings, out: Path | None = None, heading: Heading | None = None) -> Study:
    """Resolve the settings and look at the folder `out`, which may hold a part of this very study. Writes nothing.

    Without `out` the folder is named after the settings, so that the same study is found again. Raises UsageError if
    the folder holds a study with other settings.
    """
    choice = choose(settings)
    settings = choice.settings
    resolved = settings.to_json()
    if out is None:
        name = heading.folder if heading else f"compare-{settings.model}-{settings.data}"
        out = Path("runs") / in_path(f"{name}-{settings.digest}", "the name of the study's folder")
    check_folder(out, resolved)
    return Study(settings, out, tasks_in(out, settings), choice.left_out, heading)


def tasks_in(out: Path, settings: CompareSettings) -> tuple[Task, ...]:
    """Every run of a study, in a folder of its own."""
    return tuple(Task(run, out / "runs" / in_path(run.id, f"{out}: the name of a run")) for run in settings.runs())


def sample(settings: CompareSettings, method: str) -> TrainSettings:
    """Some run of a method: the one whose schedule and costs stand for all."""
    largest = max(known(settings.batch_size))
    return next(run for run in settings.runs() if run.method == method and run.batch_size == largest)


def check_folder(out: Path, resolved: dict[str, Any]) -> None:
    """Raise UsageError for a folder that belongs to something else than a study with these settings."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    found = out / STUDY
    if found.is_file():
        there = read_content(found)["settings"]
        refuse_other(out, "a study", there, resolved)
    elif out.is_dir() and any(path.name != LOCK for path in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no study: choose another --out")


def refuse_other(out: Path, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError if a folder's settings are not the ones that are wanted, naming those that differ."""
    differing = [key for key in here if there.get(key) != here[key]]
    if differing:
        listing = "; ".join(f"{key}: {there.get(key)!r} there, {here[key]!r} here" for key in differing)
        raise UsageError(f"{out} holds {what} with other settings ({listing}): choose another --out, or delete it")


def read_content(path: Path) -> dict[str, Any]:
    """What the file of a study on the disk says; its settings are there."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content["settings"], dict):
            raise TypeError("no settings in it")
        return content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}): choose another --out, or delete that folder") from error


@contextmanager
def claimed(study: Study, *, alone: bool = True) -> Iterator[None]:
    """Make the study's folder, and keep other processes out of it for a while; unless `alone` those that share it."""
    with writing(study.out):
        study.out.mkdir(parents=True, exist_ok=True)
        lock = locked(study.out / LOCK, study.out, alone=alone)
    with lock:
        resolved = study.settings.to_json()
        check_folder(study.out, resolved)
        free = shutil.disk_usage(study.out).free
        if free < ROOM:
            raise FullDiskError(f"{study.out} has {free / 2**20:.0f} MiB free, a study needs {ROOM / 2**20:.0f}: free "
                             "some, or choose an --out elsewhere")  # fmt: skip
        with writing(study.out):
            content = {"settings": resolved, "versions": versions(), "left_out": dict(study.left_out),
                       "heading": study.heading and study.heading.to_json()}  # fmt: skip
            write_json(study.out / STUDY, content)
        yield


def read_study(out: Path) -> Study:
    """A study, or a single run of `stretto train`, as it was left. Raises UsageError if there is neither."""
    if (out / RUN).is_file():
        return study_of_run(out)
    path = out / STUDY
    if not path.is_file():
        raise UsageError(f"nothing to report in {out}: it has neither {STUDY} nor {RUN}. Name a folder that "
                         "`stretto compare` or `stretto train` has written")  # fmt: skip
    try:
        content = read_content(path)
        settings = CompareSettings.from_json(content["settings"], str(path))
        heading = Heading.from_json(content["heading"]) if content.get("heading") else None
    except TypeError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return Study(settings, out, tasks_in(out, settings), content.get("left_out", {}), heading)


def study_of_run(folder: Path) -> Study:
    """A study that consists of one run."""
    run = TrainSettings.from_json(read_run(folder)[0]["settings"], str(folder / RUN))
    shared = {field.name: getattr(run, field.name) for field in fields(Settings)}
    shared["workers"] = run.stage_workers
    swept = CompareSettings(
        **shared, methods=(run.method,), lr=(known(run.lr),), batch_size=(known(run.batch_size),), seeds=1
    )
    return Study(swept, folder, (Task(run, folder),))
