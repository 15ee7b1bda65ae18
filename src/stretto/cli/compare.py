"""stretto compare: train under several methods, draw cost against time."""

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto import interrupts
from stretto.cli.output import Output, print_json, print_settings
from stretto.cli.study_file import study_file
from stretto.errors import UsageError
from stretto.options.extras import missing
from stretto.settings.command_line import FLAG, NUMBER, OUTPUT, PROCESSES, WHOLE
from stretto.settings.runs import CompareSettings, check_jobs, known
from stretto.system import fork_server

if TYPE_CHECKING:
    from stretto.report.record import Heading
    from stretto.study import Outcome, Study


@dataclass(frozen=True, kw_only=True)
class Pool:
    """How the runs share processes and machines."""

    jobs: Annotated[int | None, WHOLE] = None
    """Runs made at a time; by default one a core, divided by --threads; with --workers one."""
    timeout: Annotated[float | None, NUMBER] = None
    """With --workers, seconds that a worker waits for another; by default 600."""
    storage: str | None = None
    """Where several of these commands share runs: journal:PATH, sqlite:///PATH or
    postgresql://USER:PASSWORD@HOST/NAME. Give all the same settings. Needs optuna: the extra "sweep"."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a study file is run."""

    size: str | None = None
    """Size of a study file: small (this machine, the default) or full (a cluster)."""
    part: str | None = None
    """The part of a study file to run; by default all, one after the other."""


@dataclass(frozen=True)
class Sweep:
    """The settings of one sweep, the folder for its page, and the title that a study file gives it."""

    settings: CompareSettings
    out: Path | None = None
    heading: "Heading | None" = None


def compare(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[CompareSettings, Parameter(name="*")] = CompareSettings(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*"), OUTPUT] = Output(),  # noqa: B008 - frozen
    pool: Annotated[Pool, Parameter(name="*"), PROCESSES] = Pool(),
    selection: Annotated[Selection, Parameter(name="*")] = Selection(),
    trace_operations: Annotated[bool, FLAG, OUTPUT] = False,
    parts: Annotated[Mapping[str, CompareSettings] | None, Parameter(parse=False)] = None,
) -> int:
    """Train a network under several methods and draw what each costs against the time it takes.

    Every method runs over the same sweep of learning rates and batch sizes with the same seeds. The result is a table
    and one page, report.html. A study that was interrupted goes on where it stopped when the same command is given.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win. Or a study file (studies/): the title,
        source and claim of a figure, settings, tables [small] and [full] that override them, and [parts.NAME] for
        several sweeps.
    trace_operations
        Record what each worker did, and torch's operations in three steps: trace.pftrace in each run's folder, for
        ui.perfetto.dev, and timelines in the report.
    """
    from stretto.methods.table import check_written

    chosen = parts or {"": settings}
    for swept in chosen.values():
        for name in swept.methods:
            if name != "all":
                check_written(name)  # a mistyped one is told before torch is imported
        check_jobs(swept, pool.jobs)
        check_timeout(swept, pool.timeout)
    sweeps = sweeps_of(config, chosen, output.out, selection)
    if output.dry_run:
        return show_settings(sweeps, output)
    with interrupts.ending_at_once():
        if pool.jobs != 1 or any(swept.workers is not None for swept in chosen.values()):
            fork_server.prepare()
        from stretto.study import report_page  # noqa: F401 - imports torch, and all that follows needs
    outcomes = {name: run(sweep, output, pool, operations=trace_operations) for name, sweep in sweeps.items()}
    if output.json:
        content = {name: outcome.to_json() for name, outcome in outcomes.items()}
        print_json({"parts": content} if parts else content[""])
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    return (2 if all(failure.is_users for failure in failures) else 1) if failures else 0


def check_timeout(settings: CompareSettings, timeout: float | None) -> None:
    """Raise UsageError for a timeout without --workers, and for one that is not above 0."""
    if timeout is not None and settings.workers is None:
        raise UsageError(f"--timeout {timeout:g}: it is for processes that wait for each other; give --workers, too")
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"timeout={timeout:g}: choose a number of seconds above 0")


def sweeps_of(
    file: Path | None, parts: Mapping[str, CompareSettings], out: Path | None, selection: Selection
) -> dict[str, Sweep]:
    """The sweeps to run, by the names of their parts. Raises UsageError for a size or a part of what has none."""
    study = None if file is None else study_file(file)
    if study is None:
        for name, value in vars(selection).items():
            if value is not None:
                raise UsageError(f"{name}={value!r} is one of a study file: name its file, or leave --{name} out")
        return {name: Sweep(settings, out) for name, settings in parts.items()}
    study.refuse_commands(study.size(selection.size))
    return {
        name: Sweep(
            settings, out / name if out and name else out, study.heading(selection.size, name or selection.part)
        )
        for name, settings in parts.items()
    }


def show_settings(sweeps: Mapping[str, Sweep], output: Output) -> int:
    """Print the resolved configuration of each part; the exit status."""
    from stretto import study

    resolved = {name: study.resolve_study(sweep.settings) for name, sweep in sweeps.items()}
    if output.json and "" not in resolved:
        print_json({"parts": {name: settings.to_show() for name, settings in resolved.items()}})
        return 0
    for name, settings in resolved.items():
        if name:
            print(f"# part {name}")
        print_settings(settings, output)
    return 0


AGAIN = "the same command tries these runs again"


def run(sweep: Sweep, output: Output, pool: Pool, *, operations: bool) -> "Outcome":
    """Train the runs of a sweep that are not finished, and write its page."""
    from stretto import study
    from stretto.study.outlook import outlook
    from stretto.study.report_page import PAGE
    from stretto.study.shared_queue import open_storage, without_password
    from stretto.trainer.progress import progress, say

    if pool.storage is not None:
        open_storage(pool.storage)  # what is wrong with it is told before anything else
    opened = study.open_study(sweep.settings, sweep.out, sweep.heading)
    wanted: dict[str, Any] = {"operations": operations} | ({} if pool.timeout is None else {"timeout": pool.timeout})
    opened = replace(opened, tasks=tuple(replace(task, **wanted) for task in opened.tasks))
    tell_beginning(sweep, opened, output)
    pending = opened.pending
    runs, done = len(opened.tasks), len(opened.tasks) - len(pending)
    steps, ahead = (sum(known(task.settings.steps) for task in tasks) for tasks in (opened.tasks, pending))
    if done:
        output.say(f"{opened.out}: {done} of {runs} runs are finished already")
    if not output.silent and pending:
        say(outlook(opened, pool.jobs))
    title = f"{opened.settings.model} on {opened.settings.data}"
    with progress(title, steps, done=steps - ahead, silent=output.silent) as bar:
        ended, told = done, output.silent or bool(missing("report"))

        def on_steps(steps: int) -> None:
            nonlocal told
            if not told:
                print(f"finished runs appear in {opened.out / PAGE}", file=sys.stderr)
                told = True
            bar.advance(steps)

        def on_run(_: object) -> None:
            nonlocal ended
            ended += 1
            bar.note = f"{ended}/{runs} runs"

        bar.note = f"{ended}/{runs} runs"
        command = shlex.join(["stretto", *map(without_password, sys.argv[1:])])
        outcome = study.compare(
            opened,
            jobs=pool.jobs,
            on_steps=on_steps,
            on_run=on_run,
            command=command,
            storage=pool.storage,
            tell=lambda text: say(f"stretto: {text}"),
        )
    show_outcome(outcome, output)
    if operations:
        write_traces(opened, output)
    for complaint in outcome.complaints:
        print(f"stretto: {complaint}", file=sys.stderr)
    if pending and outcome.failures:
        users = all(failure.is_users for failure in outcome.failures)
        remedy = "leave these methods out, or mend what they name and give another --out" if users else AGAIN
        print(f"stretto: {remedy}", file=sys.stderr)
    return outcome


def tell_beginning(sweep: Sweep, opened: "Study", output: Output) -> None:
    """Say what is to be known of a study before its runs begin."""
    from stretto.methods.advice import meaning
    from stretto.study.prepare import advice_in

    if sweep.heading is not None:
        output.say(f"{sweep.heading.text} ({sweep.heading.size})")
    for note in (*map(meaning, advice_in(sweep.settings, opened.settings).values()), *opened.notes):
        output.say(note)
    for name, reason in opened.left_out.items():
        output.say(f"left out: {name}: {reason}")


def write_traces(study: "Study", output: Output) -> None:
    """Write the trace of each run that was traced into its folder, and say where there is none."""
    from stretto.cli.output import inside, write_trace
    from stretto.cli.train import TRACE
    from stretto.study.report_page import traced_runs
    from stretto.study.study import prepared_trials

    written = 0
    for run in traced_runs(study, prepared_trials(study)):
        write_trace(inside(run.task.folder, TRACE), run.recordings, run.phases)
        written += 1
    output.say(f"traces of {written} of {len(study.tasks)} runs: {TRACE} in their folders, below {study.out}")
    finished = len(study.tasks) - len(study.pending)
    if written < finished:
        output.say(f"{finished - written} runs were made before, without a trace: delete them to trace them")


def show_outcome(outcome: "Outcome", output: Output) -> None:
    """Print the table, and where the page is."""
    from stretto.report.record import several_devices
    from stretto.report.terminal import table

    output.say(table(outcome.records))
    several = several_devices(outcome.records)
    if several:
        output.say(several)
    lacking = missing("report")
    if not lacking:
        output.say(f"report: {outcome.report}")
    elif not output.silent:
        remedy = 'pip install "stretto[report]", then the same command writes it'
        print(f"stretto: no {outcome.report.name}, which needs {' and '.join(lacking)}: {remedy}", file=sys.stderr)
