"""`stretto.compare` and `stretto.train`: the commands of the same names, with objects instead of names."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stretto.data.user_data import add_to_digest
from stretto.errors import UsageError, nearest
from stretto.mesh import Mesh
from stretto.nn.devices import computing_with
from stretto.options.checks import flag, is_among, number, of_kind, refuse, sequence, shown
from stretto.options.checks import path as check_path
from stretto.options.extras import require
from stretto.options.import_object import ObjectFactory, register, write_objects
from stretto.report import Record, summarize
from stretto.report.metric import metric
from stretto.report.panel import panel
from stretto.report.record import several_devices
from stretto.report.terminal import table
from stretto.runtime.launch import LaunchSettings
from stretto.runtime.process_memory import forget_most_held
from stretto.runtime.world import place_in_job
from stretto.settings.runs import CompareSettings, Settings, TrainSettings, check_jobs, known
from stretto.study.comparison import Outcome, run_json
from stretto.study.comparison import compare as make_runs
from stretto.study.first_batches import refuse_evaluation, refuse_other_sizes
from stretto.study.outlook import outlook
from stretto.study.prepare import advice_in, check_rate, costs_of, prepare, prepare_trial, resolve
from stretto.study.report_page import track_run
from stretto.study.run_processes import run_on_processes
from stretto.study.single_run import Resume, as_begun, claim, default_folder, in_words, refuse_full_disk, summary
from stretto.study.store import FOLDER, MODEL, read_run
from stretto.study.study import notes_on, open_study
from stretto.study.training_run import Task, counting, make_run
from stretto.system import fork_server
from stretto.system.temporary_folders import scratch
from stretto.trackers import find as find_trackers
from stretto.trainer.progress import progress, say

SWEPT = ("methods", "lr", "batch_size", "seeds")


@dataclass(frozen=True, eq=False)
class FinishedStudy:
    """The runs of a study that has ended; in a notebook it is shown as a table and a picture."""

    outcome: Outcome
    settings: CompareSettings

    @property
    def runs(self) -> list[dict[str, Any]]:
        """A dict for each run, with the keys that `stretto compare --json` prints."""
        return [run_json(record) for record in self.outcome.records]

    def frontier(self, metric_name: str, cut_off: float) -> list[dict[str, Any]]:
        """The runs that reach a cut-off of a metric ("train_loss", "validation_accuracy", or one of your own).

        Of each method those that no other run of it beats in serial and in total compute. Each is its dict, with the
        compute, the seconds and the step of its arrival instead of those of its end. Raises UsageError for a metric
        that there is not.
        """
        number("cut_off", cut_off)
        arrivals = panel(self.outcome.records, metric(metric_name, self.outcome.records), cut_off).arrivals
        reached = [(arrival.record, arrival.to_json()) for arrival in arrivals if not arrival.dominated]
        keys = ("step", "serial_flops", "total_flops", "seconds")
        return [run_json(record) | {key: arrival[key] for key in keys} for record, arrival in reached]

    def best(self, metric_name: str | None = None) -> dict[str, Any]:
        """The finished run that is best on validation, or in the metric named. Raises UsageError if there is none."""
        if metric_name is None:
            chosen = [(s.metric, s.chosen) for s in summarize(self.outcome.records) if s.chosen is not None]
        else:
            judged = metric(metric_name, self.outcome.records)
            chosen = [(judged, record) for record in self.outcome.records if judged.final(record) is not None]
        if not chosen:
            raise UsageError(f"none of the {len(self.outcome.records)} runs has finished with such a value")
        return run_json(min(chosen, key=lambda pair: pair[0].cost(known(pair[0].final(pair[1]))))[1])

    def table(self) -> str:
        """The table that `stretto compare` prints."""
        from rich.console import Console

        written = io.StringIO()
        Console(file=written, width=100).print(table(self.outcome.records))
        return written.getvalue()

    def report(self) -> Path:
        """The page with all charts, report.html. Raises UsageError where its packages were not installed."""
        if not self.outcome.report.is_file():
            require("report", f"{self.outcome.report}")
        return self.outcome.report

    @property
    def failed(self) -> dict[str, str]:
        """Why runs could not be made, by their names."""
        return {failure.task.settings.id: failure.reason for failure in self.outcome.failures}

    def __repr__(self) -> str:
        failed = f", {len(self.outcome.failures)} failed" if self.outcome.failures else ""
        told = self.table() + several_devices(self.outcome.records)
        return f"{len(self.outcome.records)} runs{failed}, {self.outcome.report}\n{told}"

    def _repr_html_(self) -> str:
        from html import escape

        picture = self.outcome.report.with_name("frontier.svg")
        drawn = picture.read_text(encoding="utf-8") if picture.is_file() else ""
        told = self.table() + several_devices(self.outcome.records)
        return f"<pre>{escape(told)}</pre>{drawn}<p>{escape(str(self.outcome.report))}</p>"


@dataclass(frozen=True, eq=False)
class FinishedRun(Mapping[str, Any]):
    """A run that has ended: a dict with the keys that `stretto train --json` prints, and the weights it came to."""

    figures: Mapping[str, Any]
    folder: Path
    record: Record

    def __getitem__(self, key: str) -> Any:
        return self.figures[key]

    def __iter__(self) -> Any:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights, as `load_state_dict` of the module takes them."""
        from safetensors.torch import load_file

        parts = sorted((self.folder / FOLDER).glob("*.safetensors"))
        if parts:  # of a Hugging Face model
            return {name: tensor for part in parts for name, tensor in load_file(part).items()}
        return load_file(self.folder / MODEL)

    def __repr__(self) -> str:
        return in_words(self.figures)


def compare(
    model: Any,
    data: Any,
    *,
    methods: Sequence[str] = ("backprop", "greedy", "overlapping", "chunked(chunks=2)"),
    loss: Any = "auto",
    optimizer: Any = "auto",
    metrics: Mapping[str, Any] | None = None,
    lr: float | Sequence[float] | None = None,
    batch_size: int | Sequence[int] | None = None,
    steps: int | None = None,
    seeds: int = 2,
    stages: int | None = None,
    workers: int | None = None,
    mesh: Mesh | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    quiet: bool = False,
    **settings: Any,
) -> FinishedStudy:
    """Train under several methods, as `stretto compare` does; a study that was interrupted goes on.

    Args:
        model: a function that makes the module (or a list of layers), called under each run's seed; or the module; or a
            name, of a built-in network or path/to/file.py:function.
        data: (train, validation) or (train, validation, test), each a pair of tensors, a torch Dataset, a DataLoader or
            a Hugging Face dataset; a function that returns that; or a name.
        methods: methods with their options; "all" stands for every one that can run.
        loss: (output, target) -> a mean over examples, or (sum, count); or a name in torch.nn.functional.
        optimizer: parameters of a stage -> optimizer, as Trainer takes it, called with lr= if it has that argument; or
            a name, "adamw".
        metrics: further measures by name, functions (output, target) -> number as `Trainer.evaluate` takes them.
        lr, batch_size: one, or several to compare; chosen by the optimizer and the data unless given.
        steps: updates of each stage.
        seeds: runs of each configuration.
        stages, workers: of a pipeline; without workers one process emulates them.
        mesh: replicas, and processes that share stages, as Trainer takes them.
        out: folder of the study; named after its settings unless given.
        jobs: runs made at a time; one a core unless given.
        quiet: show no progress.
        settings: any other option of the command line, with its name there: `weight_decay=0.01`, `device="cpu"`,
            `threads=4` (of each process, one unless given), `log="tensorboard"` (or "wandb", "mlflow", "csv", a
            stretto.trackers.Tracker, or several).

    Raises UsageError, before the first run, for what cannot work.
    """
    chosen = common(model, data, loss, optimizer, metrics, mesh, settings, CompareSettings)
    check_shown(out, quiet)
    methods = (methods,) if isinstance(methods, str) else methods
    sequence("methods", methods, "a list of methods, such as ['backprop', 'greedy']")
    swept: dict[str, Any] = {"lr": listed("lr", lr), "batch_size": listed("batch_size", batch_size), "seeds": seeds}
    several = CompareSettings(
        methods=tuple(map(str, methods)), **swept, steps=steps, stages=stages, workers=workers, **chosen
    )
    check_jobs(several, jobs)
    with scratch() as folder:
        objects = folder / "objects"
        write_objects(objects, several.functions.values())
        study = open_study(several, None if out is None else Path(out))
        study = replace(study, tasks=tuple(replace(task, objects=objects) for task in study.tasks))
        if jobs != 1 or workers is not None:
            fork_server.prepare()
        for note in study.notes:
            print(note, file=sys.stderr)
        if study.pending and not quiet:
            say(outlook(study, jobs))
        pending = sum(known(task.settings.steps) for task in study.pending)
        with progress(f"{len(study.tasks)} runs", pending, silent=quiet, lines=False) as bar:
            outcome = make_runs(study, jobs=jobs, on_steps=bar.advance, tell=lambda text: print(text, file=sys.stderr))
    if outcome.not_tried:
        print(*outcome.complaints, file=sys.stderr)
    return FinishedStudy(outcome, study.settings)


def train(
    model: Any,
    data: Any,
    *,
    method: str = "backprop",
    loss: Any = "auto",
    optimizer: Any = "auto",
    metrics: Mapping[str, Any] | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    stages: int | None = None,
    workers: int | None = None,
    mesh: Mesh | None = None,
    out: str | Path | None = None,
    resume: Resume = False,
    quiet: bool = False,
    **settings: Any,
) -> FinishedRun:
    """Train once, as `stretto train` does. Arguments are those of `compare`.

    A finished run in the same folder is read, not made again; `resume` goes on from its newest checkpoint, and "auto"
    begins where there is none.
    """
    if not is_among(resume, (True, False, "auto")):
        refuse("resume", resume, "True, False or 'auto'")
    chosen = common(model, data, loss, optimizer, metrics, mesh, settings, TrainSettings)
    listed("lr", lr)
    check_shown(out, quiet)
    chosen |= {"method": str(method), "stages": stages, "workers": workers}
    asked = TrainSettings(lr=lr, batch_size=batch_size, seed=seed, steps=steps, **chosen)
    check_rate(asked)
    resolved = resolve(asked)
    resolved = as_begun(str(method), resolved, None if out is None else Path(out)) if resume else resolved
    folder = default_folder(resolved) if out is None else Path(out)
    claimed = claim(folder, resolved, resume=resume)
    if resume == "auto" and not quiet:
        say(claimed.told)
    if not claimed.made:
        forget_most_held()  # what this script held before is not the run's
        prepared = (prepare if workers is None else prepare_trial)(resolved)
        refuse_other_sizes(prepared)
        refuse_evaluation(prepared)
        refuse_full_disk(prepared, folder)
        if not quiet:
            for note in notes_on({resolved.method: prepared}, advice_in(asked, resolved).values()):
                say(note)
        title = f"{resolved.model} on {resolved.data}, {resolved.method}"
        with progress(title, known(resolved.steps), silent=quiet, lines=False) as bar, scratch() as temporary:
            on_step, warned = counting(bar.advance), prepared.trainer.backend.means.warned
            task = Task(resolved, folder, resume=claimed.step > 0, keeps=True, warned=warned)
            if workers is None:
                with computing_with(resolved.threads):  # as on several processes
                    make_run(task, on_step, prepared)
            else:
                objects = temporary / "objects"
                write_objects(objects, resolved.functions.values())
                task = replace(task, costs=costs_of(prepared), objects=objects)
                run_on_processes(task, LaunchSettings(workers=workers), on_step)
        track_run(folder, resolved)
    run, record = read_run(folder)
    return FinishedRun(summary(run, record, folder), folder, record)


def common(
    model: Any,
    data: Any,
    loss: Any,
    optimizer: Any,
    metrics: Mapping[str, Any] | None,
    mesh: Mesh | None,
    others: Mapping[str, Any],
    kind: type[Settings],
) -> dict[str, Any]:
    """The settings that both calls take, with names for the objects that were given."""
    _, launched = place_in_job()
    if launched > 1:
        raise UsageError(
            f"a launcher such as torchrun has started {launched} processes of this script, but stretto.train and "
            f"stretto.compare start their own: run it without torchrun, with workers={launched}"
        )
    if metrics is not None:
        of_kind("metrics", metrics, Mapping, "a dict of functions by name, metrics={'mae': mae}")
    known_settings = [field.name for field in fields(kind) if field.name != "sources"]
    for name in others:
        if name not in known_settings:
            raise UsageError(f"unknown argument {name!r}: {nearest(name, known_settings)}")
    axes: dict[str, Any] = {}
    if mesh is not None:
        of_kind("mesh", mesh, Mesh, "stretto.Mesh(data=2)")
        axes = {"data_parallel": mesh.data, "tensor": mesh.tensor, "space": tuple(mesh.space)}
    return {
        "model": named("model", model, makes=(nn.Module, list, nn.ModuleList)),
        "data": named("data", data, makes=(tuple, list, Mapping)),
        "loss": named("loss", loss),
        "optimizer": named("optimizer", optimizer),
        "metric": tuple(f"{name}={named(name, function)}" for name, function in (metrics or {}).items()),
        **axes,
        **{name: AS_SETTING.get(name, in_tuple)(value) for name, value in others.items()},
    }


def in_tuple(value: Any) -> Any:
    """A list as a tuple, which settings hold; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


AS_SETTING: Mapping[str, Callable[[Any], Any]] = {
    "device": str,
    "log": lambda given: tuple(map(str, find_trackers(given))),
}


def check_shown(out: Any, quiet: Any) -> None:
    """Refuse a folder that is no path, and what is neither True nor False."""
    if out is not None:
        check_path("out", out)
    flag("quiet", quiet)


def named(what: str, value: Any, makes: tuple[type, ...] = ()) -> str:
    """The name of an object for settings: text is one; what a function would return is wrapped into a function."""
    if isinstance(value, str):
        return value
    if makes and isinstance(value, makes):
        is_model = what == "model"
        return register(what, ObjectFactory(value, digest_of_layers(value) if is_model else "given", copied=is_model))
    if not callable(value):
        raise UsageError(f"{what}={shown(value)}: give a function, its result, or a name")
    return register(what, value)


def digest_of_layers(model: Any) -> str:
    """A digest of a module, or of several: of their texts and of the values of their states."""
    modules = [model] if isinstance(model, nn.Module) else model
    states = [
        [repr(module), *((name, "lazy" if is_lazy(value) else value) for name, value in module.state_dict().items())]
        for module in modules
        if isinstance(module, nn.Module)
    ]
    digest = sha256()
    add_to_digest(digest, states)
    return digest.hexdigest()[:16]


def listed(name: str, value: Any) -> tuple[Any, ...] | None:
    """One number or several as a tuple. Raises UsageError for anything else."""
    if value is None:
        return None
    several = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for one in several:
        of_kind(name, one, (int, float), "a number, or a list of numbers")
    return several
