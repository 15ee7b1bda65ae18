"""A study: its methods, those that are named and for `all` every other one that can run; its settings and its runs on
the disk, and which of them are finished.
"""

import inspect
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from stretto.errors import ScheduleError, UsageError
from stretto.heads.head import TrainedLoss
from stretto.measure import NOTES
from stretto.measure.flops import durations
from stretto.methods import BASELINE, METHODS, Method, method
from stretto.methods.advice import explained, idle_chunks, one_loss, refusal
from stretto.methods.cure import Correction, Place, Prediction
from stretto.methods.table import builder, is_advised
from stretto.nn.group_norm import parted_norms, uses_batch_statistics
from stretto.options.import_object import is_function
from stretto.options.kinds import check_values, read_json
from stretto.options.named import parse
from stretto.report import Page, Record
from stretto.report.record import Heading
from stretto.schedule import draw
from stretto.settings.runs import CompareSettings, Settings, TrainSettings, known, short
from stretto.simulate import simulate
from stretto.study import store
from stretto.study.first_batches import refuse_evaluation, refuse_other_sizes
from stretto.study.model_costs import refuse_loss_in_parts
from stretto.study.prepare import (
    Prepared,
    advice_in,
    check_rate,
    costs_of,
    prepare_trial,
    resolve,
    same_weights,
    with_optimizer,
    written,
)
from stretto.study.store import (
    LOCK,
    RUN,
    STUDY,
    differing,
    is_partial,
    locked,
    read_run,
    refuse_full,
    refuse_other,
    versions,
    write_json,
    writing,
)
from stretto.study.training_run import Task
from stretto.system import destinations
from stretto.system.destinations import followed
from stretto.system.path_names import in_path
from stretto.trainer.tracking import bubble_of

ALL = "all"
MOST_NAMES = 8  # of methods in a title
HEADS_NOTE = (
    "The layers of the paper's auxiliary heads could not be retrieved; these are ours: one linear layer on vectors, "
    "global average pooling and a linear layer on images, a final norm and an unembedding on text; other heads are "
    "named in their method. Their cost is included."
)
NOT_COMPARED = ("name", "summary", "options", "planning", "advice")  # fields of a method: it does the same


@dataclass(frozen=True)
class ChosenMethods:
    """Resolved settings that name every method, each method's sample run prepared, and {method: why it was left out of
    `all`}.
    """

    settings: CompareSettings
    prepared: Mapping[str, Prepared]
    left_out: Mapping[str, str]


def choose(settings: CompareSettings) -> ChosenMethods:
    """Resolve the settings and try every method. Raises UsageError if a named method cannot run, or no method can.

    Of `all`, methods that cannot run are left out, and so are methods that do the same as one before them.
    """
    check_rate(settings)
    named = tuple(name for name in settings.methods if name != ALL)
    if named == settings.methods:
        resolved = resolve(with_optimizer(settings, [method(name) for name in named if not is_advised(name)]))
        return ChosenMethods(resolved, attempts(resolved, by_name(advice_in(settings, resolved))), {})
    resolved = resolve(replace(settings, methods=named or (BASELINE,)))
    advice, prepared = advice_in(settings, resolved), dict[str, Prepared]()
    advised = by_name(advice)
    for name in resolved.methods if named else ():
        with explained(advised.get(name, method(name))):
            prepared[name] = attempt(resolved, name, prepared)
    added, left_out = others(resolved, prepared)
    if not prepared and not added:
        raise UsageError(f"no method can run on these settings: {next(iter(left_out.values()))}")
    order = tuple(in_order(settings.methods, advice, [*added]))
    prepared |= added
    return ChosenMethods(resolve(replace(resolved, methods=order)), {name: prepared[name] for name in order}, left_out)


def by_name(advice: Mapping[str, Method]) -> dict[str, Method]:
    """What "async" and "local" stand for, by the names that settings have for it."""
    return {str(chosen): chosen for chosen in advice.values()}


def attempts(settings: CompareSettings, advice: Mapping[str, Method]) -> dict[str, Prepared]:
    """Each method's sample run, prepared. Raises UsageError, which names every method that cannot train, and why.

    A reason that is not a method's own, as it holds for the first two alike, is said alone and at once. `advice` has
    the methods that "async" and "local" stand for.
    """
    prepared, misfits = dict[str, Prepared](), dict[str, list[str]]()  # reason: methods
    for index, name in enumerate(settings.methods):
        try:
            prepared[name] = attempt(settings, name, prepared)
        except (UsageError, ScheduleError) as error:
            misfits.setdefault(str(error), []).append(name)
            alone = len(settings.methods) == 1 and not advice
            if alone or (index == 1 and len(misfits[str(error)]) == 2):
                raise
    if misfits:
        raise UsageError("\n".join(misfit(names, reason, advice) for reason, names in misfits.items()))
    return prepared


def misfit(names: Sequence[str], reason: str, advice: Mapping[str, Method]) -> str:
    """A line on methods that cannot train, and why."""
    if len(names) == 1 and names[0] in advice:
        return refusal(advice[names[0]], reason)
    return f"{', '.join(names)}: {reason}"


def others(settings: CompareSettings, named: Mapping[str, Prepared]) -> tuple[dict[str, Prepared], dict[str, str]]:
    """The methods of the table, besides the named ones, that can run; and {method: why it is left out}."""
    behaviors = {name: behavior(prepared) for name, prepared in named.items()}
    added, left_out = dict[str, Prepared](), dict[str, str]()
    for name in METHODS:
        if name in behaviors:
            continue
        try:
            prepared = attempt(settings, name, {**named, **added})
        except (UsageError, ScheduleError) as error:
            left_out[name] = str(error)
            continue
        own_behavior = behavior(prepared)
        same = next((other for other, known in behaviors.items() if known == own_behavior), None)
        if same is None:
            behaviors[name], added[name] = own_behavior, prepared
        else:
            left_out[name] = f"the same as {same} where stages={settings.stages}"
    return added, left_out


def in_order(asked: tuple[str, ...], advice: Mapping[str, Method], added: list[str]) -> Iterator[str]:
    """The methods in the order in which they were asked for, with those added for `all` in its place.

    What "async" and "local" stand for counts once.
    """
    advised, yielded = by_name(advice), set[str]()
    for name in asked:
        if name == ALL:
            yield from added
            continue
        chosen = str(advice.get(name) or written(name))
        if chosen not in advised or chosen not in yielded:
            yielded.add(chosen)
            yield chosen


def attempt(settings: CompareSettings, name: str, before: Mapping[str, Prepared]) -> Prepared:
    """Prepare a method's run at every batch size; return its `sample`. Raises UsageError if one cannot train.

    What is no mean over examples is said with the first of the methods, of which some came `before`.
    """
    only = replace(settings, methods=(name,), lr=settings.lr and settings.lr[:1], seeds=1)
    prepared = [prepare_trial(run) for run in only.runs()]
    for trial in prepared:
        refuse_other_sizes(trial)
        refuse_loss_in_parts(trial)
    means = next(iter([*before.values(), *prepared])).trainer.backend.means
    for trial in prepared:
        trial.trainer.backend.means = means
    refuse_evaluation(prepared[0])
    return max(prepared, key=lambda trial: known(trial.settings.batch_size))


def behavior(prepared: Prepared) -> Any:
    """What a method does on its stages and workers: equal for two methods that differ in name and options only.

    Parts that cannot be compared count as different.
    """
    trainer, momentum = prepared.trainer, prepared.settings.momentum or 0.0
    chosen = trainer.method
    delays = chosen.delays(trainer.schedule).mean
    mean = sum(delays) / len(delays)
    places = [Place(stage, len(delays), delay, momentum, None, mean) for stage, delay in enumerate(delays)]
    separate = (*NOT_COMPARED, "reach", "schedule", "workers", "cure")
    rest = [getattr(chosen, field.name) for field in fields(chosen) if field.name not in separate]
    cure = [on_stages(places, getattr(chosen.cure, field.name)) for field in fields(chosen.cure)]
    return trainer.schedule, trainer.rules, rest, cure


def on_stages(places: list[Place], cure: Any) -> Any:
    """A part of a cure, with its values on every stage."""
    if isinstance(cure, Prediction):
        return cure.form, [cure.horizon(place) for place in places]
    if isinstance(cure, Correction):
        return "correction", [cure.span(place) for place in places]
    return [cure(place) for place in places] if callable(cure) else cure


STUDY_KINDS: Mapping[str, Any] = {
    "settings": dict[str, Any],
    "left_out": dict[str, str],
    "heading": dict[str, Any] | None,
}
RUNS = "runs"  # the folder of a study's runs


@dataclass(frozen=True)
class Study:
    """A study on the disk: its resolved settings, its folder `out`, and its runs, finished or not.

    `left_out` is {method: why it is not among those that `all` stood for}; `notes` are for the user; `heading` is that
    of the study's file, if it was read from one; `page` is the report without runs, of a study that was opened.
    """

    settings: CompareSettings
    out: Path
    tasks: tuple[Task, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    heading: Heading | None = None
    notes: tuple[str, ...] = ()
    page: Page | None = None

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
    notes = notes_on(choice.prepared, advice_in(asked, settings).values()) + notes_on_seeds(settings)
    out = followed(out)
    destinations.check_folder(out)
    if check_folder(out, resolved):
        notes += (f"{out} holds a study with other settings and without a finished run: it is begun anew",)
    warned = frozenset[str]().union(*(run.trainer.backend.means.warned for run in choice.prepared.values()))
    tasks = tuple(replace(task, warned=warned) for task in tasks_in(out, settings))
    study = Study(settings, out, tasks, choice.left_out, heading, notes)
    return replace(study, page=describe(study, choice.prepared))


def notes_on(prepared: Mapping[str, Prepared], advice: Iterable[Method]) -> tuple[str, ...]:
    """What a user should know of runs before they begin: of batch norms, idle workers, and plain backprop.

    `prepared` has one run of each method, `advice` the methods that were asked for as "async" or "local".
    """
    norms = norms_note(prepared)
    idle = [idle_chunks(chosen, bubble_of(prepared[str(chosen)].trainer) or 0.0) for chosen in advice]
    plain = [one_loss(run.trainer.method, run.trainer.schedule.num_stages) for run in prepared.values()]
    return (*filter(None, [norms, *idle, *plain]),)


def norms_note(prepared: Mapping[str, Prepared]) -> str:
    """What to say of methods that cut minibatches where layers have batch norms; "" for others."""
    cutting = [name for name, run in prepared.items() if run.pieces > 1]
    if not cutting or not uses_batch_statistics(prepared[cutting[0]].model.layers):
        return ""
    return f"{', '.join(cutting)}: " + parted_norms("the parts of a minibatch (micro-batches, replicas)")


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


def prepared_trials(study: Study) -> dict[str, Prepared]:
    """The sample run of each method, prepared."""
    return {method: prepare_trial(sample(study.settings, method)) for method in study.settings.methods}


def describe(study: Study, prepared: Mapping[str, Prepared]) -> Page:
    """The page of a study without its runs: what is known before any of them is made."""
    settings = study.settings
    first = next(iter(prepared.values()))
    workers = f"{settings.workers} workers" if settings.workers else "as many workers as suit each method"
    automatic = f"{settings.model} on {settings.data}: {names(settings.methods)}"
    heads = any(
        head is not None and not isinstance(head, TrainedLoss)
        for run in prepared.values()
        for head in run.trainer.heads
    )
    return Page(
        title=study.heading.text if study.heading else automatic,
        heading=study.heading,
        records=(),
        planned=len(study.tasks),
        accounting=settings.accounting,
        accounting_note=NOTES[costs_of(first).accounting],
        dataset=first.dataset.description,
        model=f"{first.model.description}; {settings.stages} stages on {workers}",
        heads_note=HEADS_NOTE if heads else "",
        norms_note=norms_note(prepared),
        settings=settings.to_json(),
        versions=versions(),
        pictures={method: picture(run) for method, run in prepared.items()},
        own_options={method: options_of(method) for method in prepared},
        delays={method: delays(run) for method, run in prepared.items()},
        processes=study.tasks[0].settings.workers or 0,
        left_out=study.left_out,
    )


def picture(prepared: Prepared, turns: int = 3) -> str:
    """An SVG of the method's schedule; the durations of actions are their FLOPs."""
    trainer, costs = prepared.trainer, costs_of(prepared)
    megaflops = {key: value / 1e6 for key, value in costs.flops.items()}
    timeline = simulate(trainer.schedule, trainer.rules, turns, durations(megaflops))
    return draw.svg(timeline.spans, title=f"{trainer.method}: the first {turns} minibatches, to scale (MFLOP)")


def names(methods: Sequence[str]) -> str:
    """The methods for a title: their names, or their number if there are more than MOST_NAMES."""
    return ", ".join(methods) if len(methods) <= MOST_NAMES else f"{len(methods)} methods"


def options_of(method: str) -> tuple[str, ...]:
    """The names of the options that the method itself takes, as its function in the table of methods has them."""
    return tuple(inspect.signature(builder(parse(method)[0])).parameters)


def delays(prepared: Prepared) -> tuple[int, ...]:
    """The delay of gradients in the steady state, by stage, in updates."""
    trainer = prepared.trainer
    return trainer.method.delays(trainer.schedule).steady


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
        refuse_full(study.out, "a study", store.FREE_BYTES)
        with writing(study.out):
            if begins_anew:
                shutil.rmtree(study.out / RUNS, ignore_errors=True)  # why its runs failed, and their partial files
            heading, left_out = study.heading and study.heading.to_json(), dict(study.left_out)
            content = {"settings": resolved, "versions": versions(), "left_out": left_out, "heading": heading}
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
        raise UsageError(
            f"nothing to report in {out}: it has neither {STUDY} nor {RUN}. Name a folder that "
            "`stretto compare` or `stretto train` has written"
        )
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
