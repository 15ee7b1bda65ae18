"""A study on the disk: its settings, its runs, and which of them are finished."""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from stretto.errors import UsageError
from stretto.files import destinations
from stretto.files.destinations import followed
from stretto.files.path_names import in_path
from stretto.methods import Method, method
from stretto.methods.advice import idle_chunks
from stretto.nn.group_norm import parted_norms, uses_batch_statistics
from stretto.options.import_object import is_function
from stretto.options.kinds import check_values, read_json
from stretto.report import Record
from stretto.report.heading import Heading
from stretto.schedule import Rules, Schedule
from stretto.settings.runs import CompareSettings, Settings, TrainSettings, known, short
from stretto.study import disk_errors
from stretto.study.disk_errors import locked, refuse_full, writing
from stretto.study.methods import choose
from stretto.study.prepare import Prepared, advice_in, build_model, same_weights
from stretto.study.store import (
    LOCK,
    RUN,
    STUDY,
    differing,
    is_partial,
    read_run,
    refuse_other,
    versions,
    write_json,
)
from stretto.trainer.tracking import bubble, bubble_of

STUDY_KINDS: Mapping[str, Any] = {
    "settings": dict[str, Any], "left_out": dict[str, str], "heading": dict[str, Any] | None,
}  # fmt: skip
RUNS = "runs"  # the folder of a study's runs
TIMEOUT = 600.0  # seconds that workers wait for each other unless said otherwise


@dataclass(frozen=True)
class Task:
    """One run of a study and the folder for it; its workers wait for each other at most `timeout` seconds.

    With `operations` it is traced, with what ran inside the actions of some steps. `objects` is a file with the objects
    that a script has given instead of names.
    """

    settings: TrainSettings
    folder: Path
    timeout: float = TIMEOUT
    operations: bool = False
    objects: Path | None = None


@dataclass(frozen=True)
class Study:
    """A study on the disk: its resolved settings, its folder `out`, and its runs, finished or not.

    `left_out` is {method: why it is not among those that `all` stood for}; `notes` are for the user; `heading` is that
    of the study's file, if it was read from one.
    """

    settings: CompareSettings
    out: Path
    tasks: tuple[Task, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    heading: Heading | None = None
    notes: tuple[str, ...] = ()

    @property
    def pending(self) -> list[Task]:
        """The runs that are not finished; a run whose files are damaged is one of them."""
        return [task for task in self.tasks if record_of(task) is None]

    def records(self) -> tuple[Record, ...]:
        """The records of the finished runs, in the order of the settings."""
        return tuple(record for task in self.tasks if (record := record_of(task)) is not None)


def record_of(task: Task) -> Record | None:
    """The record of a finished run; None for any other."""
    try:
        record = read_run(task.folder)[1]
    except UsageError:
        return None
    return record if record.id == task.settings.id else None


def resolve_study(settings: CompareSettings) -> CompareSettings:
    """Resolve the settings and try every method. Raises UsageError for what cannot work."""
    return choose(settings).settings


def open_study(asked: CompareSettings, out: Path | None = None, heading: Heading | None = None) -> Study:
    """Resolve the settings and check the folder `out`, which may hold a part of the same study. Writes nothing.

    Without `out` the folder is named after the settings, so that the same study has the same folder. Raises UsageError
    if the folder holds a finished run of a study with other settings.
    """
    choice = choose(asked)
    settings = choice.settings
    resolved = settings.to_json()
    if out is None:
        name = heading.folder if heading else f"compare-{short(settings.model)}-{short(known(settings.data))}"
        out = Path("runs") / in_path(f"{name}-{settings.digest}", "the name of the study's folder")
    notes = notes_on(settings, advice_in(asked, settings).values())
    out = followed(out)
    destinations.check_folder(out)
    if check_folder(out, resolved):
        notes += (f"{out} holds a study with other settings and without a finished run: it is begun anew",)
    return Study(settings, out, tasks_in(out, settings), choice.left_out, heading, notes)


def notes_on(settings: CompareSettings, advice: Iterable[Method]) -> tuple[str, ...]:
    """What a user should know of a study before it runs: of batch norms, of advice that leaves workers idle, of seeds.

    `advice` are the methods of the settings that were asked for as "async" or "local".
    """
    cutting = [name for name in settings.methods if pieces(settings, name) > 1]
    norms = norms_note(cutting, build_model(settings).layers) if cutting else ""
    idle = [idle_chunks(chosen, bubble(*laid_out(settings, str(chosen))) or 0.0) for chosen in advice]
    return (*filter(None, [norms, *idle]), *notes_on_seeds(settings))


def notes_on_run(prepared: Prepared, chosen: Method) -> tuple[str, ...]:
    """The same of a run by this method, as it was asked for."""
    trainer = prepared.trainer
    cuts = trainer.schedule.per_turn * trainer.mesh.data > 1
    norms = norms_note([prepared.settings.method] if cuts else [], prepared.model.layers)
    idle = None if chosen.advice is None else idle_chunks(chosen, bubble_of(trainer) or 0.0)
    return (*filter(None, [norms, idle]),)


def norms_note(cutting: Sequence[str], layers: Sequence[nn.Module]) -> str:
    """What to say of methods that cut minibatches where layers have batch norms; "" for others."""
    if not cutting or not uses_batch_statistics(layers):
        return ""
    return f"{', '.join(cutting)}: " + parted_norms("the parts of a minibatch (micro-batches, replicas)")


def pieces(settings: Settings, name: str) -> int:
    """How many parts a method cuts a minibatch into, replicas included."""
    return laid_out(settings, name)[0].per_turn * settings.data_parallel


def laid_out(settings: Settings, name: str) -> tuple[Schedule, Rules]:
    """The schedule of a method on the settings' stages and workers, and its rules."""
    return method(name).plan(known(settings.stages), settings.stage_workers)


def notes_on_seeds(settings: CompareSettings) -> tuple[str, ...]:
    """What a user should know of seeds that change little."""
    if settings.seeds < 2 or not is_function(settings.model) or not same_weights(settings):
        return ()
    return (
        f"{settings.model} gives the same initial weights under every seed: the {settings.seeds} seeds differ in the "
        "order of the examples alone, and so does the spread over them",
    )


def tasks_in(out: Path, settings: CompareSettings) -> tuple[Task, ...]:
    """Every run of a study, with its folder below `out`."""
    return tuple(Task(run, out / RUNS / in_path(run.id, f"{out}: the name of a run")) for run in settings.runs())


def sample(settings: CompareSettings, method: str) -> TrainSettings:
    """The first run of a method at the largest batch size: its schedule and costs stand for all its runs."""
    largest = max(known(settings.batch_size))
    return next(run for run in settings.runs() if run.method == method and run.batch_size == largest)


def check_folder(out: Path, resolved: dict[str, Any], *, shared: bool = False) -> bool:
    """Whether a folder holds a study with other settings that can be begun anew, as none of its runs is finished.

    Raises UsageError for anything else but a study with these settings; of a `shared` study, also for other settings.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    path = out / STUDY
    if path.is_file():
        there = read_content(path)["settings"]
        if shared or holds_runs(out):
            refuse_other(out, "a study", there, resolved)
        return bool(differing(there, resolved))
    if out.is_dir() and any(entry.name != LOCK for entry in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no study: choose another --out")
    return False


def holds_runs(out: Path) -> bool:
    """Whether a study's folder has a finished run, or one with checkpoints."""
    return any(path.is_dir() and not is_partial(path) for path in (out / RUNS).glob("*"))


def read_content(path: Path) -> dict[str, Any]:
    """The content of study.json. Raises UsageError if it cannot be read or has no settings."""
    try:
        content: dict[str, Any] = read_json(path)
        check_values(f"{path}", content, STUDY_KINDS)
        if "settings" not in content:
            raise UsageError(f"{path} lacks settings")
        return content
    except UsageError as error:
        raise UsageError(f"{path.parent} is damaged ({error}): choose another --out, or delete that folder") from error


@contextmanager
def claimed(study: Study, *, exclusive: bool = True) -> Iterator[None]:
    """Make the study's folder and lock it; unless `exclusive`, processes that share the study may lock it, too."""
    with writing(study.out):
        study.out.mkdir(parents=True, exist_ok=True)
        lock = locked(study.out / LOCK, study.out, exclusive=exclusive)
    with lock:
        resolved = study.settings.to_json()
        begins_anew = check_folder(study.out, resolved, shared=not exclusive)
        refuse_full(study.out, "a study", disk_errors.FREE_BYTES)
        with writing(study.out):
            if begins_anew:
                shutil.rmtree(study.out / RUNS, ignore_errors=True)  # why its runs failed, and their partial files
            content = {"settings": resolved, "versions": versions(), "left_out": dict(study.left_out),
                       "heading": study.heading and study.heading.to_json()}  # fmt: skip
            write_json(study.out / STUDY, content)
        yield


def read_study(out: Path, trusted: Collection[str] = ()) -> Study:
    """Read a study, or a single run of `stretto train` as one. Raises UsageError if the folder holds neither.

    Functions that its settings name are called for a report: they have to be among the `trusted` ones.
    """
    if (out / RUN).is_file():
        return study_of_run(out, trusted)
    path = out / STUDY
    if not path.is_file():
        raise UsageError(f"nothing to report in {out}: it has neither {STUDY} nor {RUN}. Name a folder that "
                         "`stretto compare` or `stretto train` has written")  # fmt: skip
    content = read_content(path)
    settings = CompareSettings.from_json(content["settings"], str(path), trusted=trusted)
    heading = Heading.from_json(content["heading"], f"{path}: heading") if content.get("heading") else None
    return Study(settings, out, tasks_in(out, settings), content.get("left_out", {}), heading)


def study_of_run(folder: Path, trusted: Collection[str] = ()) -> Study:
    """A study that consists of one run."""
    content, record = read_run(folder)
    run = TrainSettings.from_json(content["settings"], str(folder / RUN), trusted=trusted)
    if record.id != run.id:
        raise UsageError(f"{folder / RUN} is damaged: its record is of {record.id!r}, and its settings of {run.id!r}")
    shared = {field.name: getattr(run, field.name) for field in fields(Settings)}
    rates, sizes = None if run.lr is None else (run.lr,), (known(run.batch_size),)
    swept = CompareSettings(**shared, methods=(run.method,), lr=rates, batch_size=sizes, seeds=1)
    return Study(swept, folder, (Task(run, folder),))
