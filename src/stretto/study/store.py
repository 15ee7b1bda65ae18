"""Runs as plain files: the folder of a run appears when the run is finished; until then it has another name.

What can go wrong with a study's folder is said here: a full disk, no permission, another process at work.
"""

import contextlib
import errno
import json
import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from stretto.errors import StrettoError, UsageError
from stretto.options.checks import shown
from stretto.options.import_object import is_given, is_model_folder
from stretto.options.kinds import check_values, read_json, read_text
from stretto.report.record import Measurement, Observation, Point, Record
from stretto.report.units import bytes_held
from stretto.settings.command_line import parse_metric
from stretto.settings.runs import CompareSettings, TrainSettings
from stretto.system.destinations import check_replaced, followed, write_whole
from stretto.tracing import Recording

FREE_BYTES = 64 * 2**20  # on the disk before a study starts, at least


class FullDiskError(StrettoError):
    """There is no room on the disk: the results of further runs would be lost."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn OSErrors of writing into FullDiskError and UsageError, which say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullDiskError(
                f"no room on the disk for {folder}: free some and start the same command again; finished runs are kept"
            ) from error
        raise UsageError(f"cannot write to {folder}: {error.strerror}: choose another --out") from error


def refuse_full(folder: Path, what: str, needed: float) -> None:
    """Raise FullDiskError where the disk of a folder, which may have to be made, has no room for `what`, some bytes."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise FullDiskError(
            f"{folder} has {bytes_held(free)} free, {what} needs {bytes_held(needed)}: free some, or choose an --out "
            "elsewhere"
        )


def locked(path: Path, folder: Path, *, exclusive: bool = True) -> TextIO:
    """Open a file and lock it until it is closed or the process ends.

    If it is not `exclusive`, other processes may hold such a lock as well. Raises UsageError, which names `folder`, if
    another process has locked it.
    """
    file = path.open("a", encoding="utf-8")
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except ImportError:  # Windows has no such lock
        pass
    except BlockingIOError as error:
        file.close()
        raise UsageError(
            f"another process is at work on {folder}: wait until it has ended, or choose another --out"
        ) from error
    return file


RUN, EVENTS, MODEL, STUDY, LOCK = "run.json", "events.jsonl", "model.safetensors", "study.json", ".lock"
HEADS = "heads.safetensors"
SOURCES, EXAMPLES = "sources", "examples"  # of settings: digests of the user's functions and data
PARTIAL, CHECKPOINTS = "partial", "checkpoints"  # the ends of the names of folders beside a run's
RUN_KINDS: Mapping[str, Any] = {  # of values in run.json that are read again
    "settings": dict[str, Any],
    "record": dict[str, Any],
    "seconds_per_step": float | None,
    "peak_memory": list[float | None],
    "trackers": dict[str, str],
}
REQUIRED = ("settings", "record")
OF_EVENTS: Mapping[str, type[Point | Observation | Measurement]] = {
    "evaluation": Point,
    "observation": Observation,
    "measurement": Measurement,
}
FOLDER = "model"  # of a run: a Hugging Face model as from_pretrained reads it


class NotReplacedError(UsageError):
    """A run is whole, but could not get the name of its folder."""


class RunWriter:
    """Writes one run into `.<name>.partial` beside its folder; `finish` renames it to the folder.

    The files of an interrupted run are removed, at once or by the next start; if it has checkpoints, its events stay
    until it is resumed. On several processes the first one does all this; each also writes a file of its own events.
    Use as a context manager.
    """

    def __init__(self, folder: Path, rank: int = 0, processes: int = 1, *, resume: bool = False) -> None:
        self.folder = folder
        self._partial = partial(folder)
        self._rank, self._processes = rank, processes
        self._resume = resume
        self._events: TextIO | None = None
        self._worker_events: TextIO | None = None

    def __enter__(self) -> "RunWriter":
        with writing(self.folder):
            if self._rank == 0 and self._partial.is_symlink():
                self._partial.unlink()
            self._partial.mkdir(parents=True, exist_ok=True)
            if self._rank == 0:
                remove_links(self._partial)
                self._events = locked(self._partial / EVENTS, self.folder)
                self._events.truncate(0)
            if self._processes > 1:
                path = self._partial / f"worker-{self._rank}.jsonl"
                self._worker_events = path.open("a", encoding="utf-8")
                if not self._resume:
                    self._worker_events.truncate(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported by then
            if kind is None:
                self.worker_event("end")
            elif issubclass(kind, KeyboardInterrupt):
                self.worker_event("interrupted", why=f"{error}")
            else:
                self.worker_event("error", why=f"{kind.__name__}: {error}")
        for file in (self._events, self._worker_events):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        kept = isinstance(error, NotReplacedError) or checkpoints_of(self.folder).exists()
        if kind is not None and self._rank == 0 and not kept:
            shutil.rmtree(self._partial, ignore_errors=True)

    def event(self, kind: str, **values: Any) -> None:
        """Append one line to the run's events."""
        self._append(self._events, kind, values)

    def worker_event(self, kind: str, **values: Any) -> None:
        """Append one line, with the time, to the events of this process, if it is one of several."""
        self._append(self._worker_events, kind, {"time": round(time.time(), 3), **values})

    def _append(self, file: TextIO | None, kind: str, values: Mapping[str, Any]) -> None:
        if file is not None:
            with writing(self.folder):
                file.write(json.dumps({"event": kind, **values}, allow_nan=False) + "\n")
                file.flush()

    def traces(self, recordings: Iterable[Recording]) -> None:
        """Write the recordings of the run's workers."""
        with writing(self.folder):
            for recording in recordings:
                recording.write(self._partial)

    @property
    def model_folder(self) -> Path:
        """The folder for a model in several files."""
        return self._partial / FOLDER

    def finish(self, run: Mapping[str, Any], weights: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> None:
        """Write run.json and the weights, flush all files to the disk, and rename the folder.

        `heads` are weights with a file of their own. Neither file is written if it would be empty. A file holds tensors
        alone: a UserWarning names what is left out.
        """
        from safetensors.torch import save

        with writing(self.folder):
            for file, state in ((MODEL, weights), (HEADS, heads)):
                if left_out := [key for key, value in state.items() if not isinstance(value, Tensor)]:
                    warnings.warn(
                        f"{file} holds tensors alone: the extra state {', '.join(left_out)} is not in it, but in "
                        "checkpoints, as Trainer.save writes them",
                        stacklevel=2,
                    )
                if state:
                    tensors = {key: value.detach().cpu().clone() for key, value in state.items() if key not in left_out}
                    (self._partial / file).write_bytes(save(tensors))
            (self._partial / RUN).write_text(json.dumps(run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            replace_into(self._partial, followed(self.folder))


def partial(folder: Path) -> Path:
    """The folder into which a run is written until it is finished: beside its own, or beside what that is a link to."""
    return beside(folder, PARTIAL)


def beside(folder: Path, role: str) -> Path:
    """The hidden folder beside that of a run; where that is a link, beside what it leads to."""
    target = followed(folder)
    return target.with_name(f".{target.name}.{role}")


def check_run_folder(folder: Path) -> None:
    """Raise UsageError where the folder of a run, or of its checkpoints, could not be written; it leaves nothing."""
    check_replaced(folder, "--out", PARTIAL, CHECKPOINTS)


def remove_links(folder: Path) -> None:
    """Remove links in a folder that may be somebody else's: what is written there is to stay there."""
    for path in folder.iterdir():
        if path.is_symlink():
            path.unlink()


def is_partial(path: Path) -> bool:
    """Whether a folder is one that `partial` names."""
    return path.name.startswith(".") and path.name.endswith(f".{PARTIAL}")


def checkpoints_of(folder: Path) -> Path:
    """The folder of the checkpoints of a run that is not finished."""
    return beside(folder, CHECKPOINTS)


def refuse_busy(folder: Path) -> None:
    """Raise UsageError if another process is writing this run."""
    events = partial(folder) / EVENTS
    if events.is_file():
        with writing(folder):
            locked(events, folder).close()


def discard(folder: Path) -> None:
    """Remove the files of an unfinished run without checkpoints, unless another process is writing it."""
    with contextlib.suppress(UsageError):
        refuse_busy(folder)
        if not checkpoints_of(folder).exists():
            shutil.rmtree(partial(folder), ignore_errors=True)


def replace_into(written: Path, folder: Path) -> None:
    """Flush the files of a folder to the disk, then rename it to `folder`, which is replaced.

    Raises OSError where the files cannot be flushed, NotReplacedError where `folder` cannot be.
    """
    for path in (path for path in written.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
        written.rename(folder)
    except OSError as error:
        raise NotReplacedError(
            f"{folder} cannot be replaced ({error.strerror}): the whole run is in {written}, rename that"
        ) from error


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The settings that have another value `there` than `here`."""
    return [key for key in {**here, **there} if setting(there, key) != setting(here, key)]


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a setting; one of `CompareSettings.added` that is missing is not used."""
    return settings.get(key, CompareSettings.added.get(key))


def refuse_other(out: Path, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError if the settings `there`, in a folder, differ from those `here`, naming the differences."""
    keys = differing(there, here)
    listing = "; ".join(
        f"{key}: {setting(there, key)!r} there, {setting(here, key)!r} here" for key in keys if key != SOURCES
    )
    if listing:
        raise UsageError(f"{out} holds {what} with other settings ({listing}): choose another --out, or delete it")
    if keys:
        raise UsageError(
            f"{out} holds {what} from before {changed_sources(there, here)} changed: choose another --out, or put it "
            "back as it was"
        )


def changed_sources(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The user's functions (or what their files import) and data whose digests differ in two settings, in words."""
    before, now = there.get(SOURCES, {}), here.get(SOURCES, {})
    names = [name for name in now | before if before.get(name) != now.get(name)]
    metrics = {f"metric {name}": place for name, place, _ in map(parse_metric, here.get("metric", ()))}
    sources = [source_of(name, metrics.get(name, here.get(name)) or name) for name in names if name != EXAMPLES]
    changed = [", ".join(dict.fromkeys(sources))] if sources else []
    return " and ".join([*changed, "the examples"] if EXAMPLES in names else changed)


def source_of(name: str, place: str) -> str:
    """What the digest of a setting covers, for messages: `name` is the setting's, `place` where its function is."""
    if is_model_folder(place):
        return place
    if is_given(place):
        return f"the {name} that was given (or what it sees: a file, a closure, a global)"
    file, colon, _ = place.rpartition(":")
    return f"{file} (or a file that it imports)" if colon else place


def write_run(folder: Path, files: Mapping[str, str]) -> None:
    """Write a run that another machine has finished, without its weights. Raises UsageError for other files."""
    if files.keys() != {RUN, EVENTS} or not all(isinstance(text, str) for text in files.values()):
        names = ", ".join(map(repr, files))
        raise UsageError(f"the storage has {names} for {folder}: a run has {RUN} and {EVENTS}, as texts")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.fetched")
    with writing(folder):
        beside.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (beside / name).write_text(text, encoding="utf-8")
        replace_into(beside, folder)


def read_run(folder: Path) -> tuple[dict[str, Any], Record]:
    """A finished run: the content of run.json, and its record. Raises UsageError if the folder is damaged."""
    try:
        return _read_run(folder / RUN, folder / EVENTS)
    except UsageError as error:
        raise UsageError(
            f"{folder} is damaged ({error}): delete this folder and start the same command again; only this run is "
            "repeated"
        ) from error


def _read_run(file: Path, events_file: Path) -> tuple[dict[str, Any], Record]:
    run: dict[str, Any] = read_json(file)
    check_values(f"{file}", run, RUN_KINDS)
    if lacking := [key for key in REQUIRED if key not in run]:
        raise UsageError(f"{file} lacks {', '.join(lacking)}")
    record = Record.from_json(run["record"], f"{file}: record")
    check_values(f"{file}: record.options", record.options, {"lr": float | None, "batch_size": int})
    settings = run["settings"]
    check_values(f"{file}", settings, TrainSettings)
    for key, value in {"method": record.method, "seed": record.seed, **record.options}.items():
        if settings.get(key) != value:
            raise UsageError(f"{file}: {key} is {shown(settings.get(key))} in settings, {shown(value)} in record")
    read: dict[type[Point | Observation | Measurement], list[Any]] = {kind: [] for kind in OF_EVENTS.values()}
    last: Any = {}
    for number, line in enumerate(read_text(events_file).splitlines(), start=1):
        last = read_json(events_file, line, number)
        place = f"{events_file}, line {number}"
        check_values(place, last, {"event": str})
        kind = OF_EVENTS.get(last.get("event", ""))
        if kind is not None:
            read[kind].append(kind.from_json(last, place))
    for each in read[Observation]:
        for key, value in vars(each).items():
            if key != "step" and len(value) != settings.get("stages"):
                of_stages = f"{len(value)} values of {settings.get('stages')} stages"
                raise UsageError(f"{events_file}: {key} of the observation at step {each.step} has {of_stages}")
    if last.get("event") != record.status:
        raise UsageError(f"{events_file} does not end with {record.status!r}, as {file} has it: its end is missing")
    return run, replace(
        record, points=tuple(read[Point]), observations=tuple(read[Observation]), measurements=tuple(read[Measurement])
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file, whole or not at all."""
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def versions() -> dict[str, str]:
    """The versions of packages and Python, and the kind of machine."""
    packages = {name: _version(name) for name in ("stretto", "torch", "numpy")}
    return {**packages, "python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}


@cache
def _version(package: str) -> str:
    """Read from its files once: a study asks with each run."""
    return version(package)
