"""stretto train: one run, emulated in one process or on several."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto import interrupts
from stretto.cli.output import Output, print_json, print_settings, write_trace
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.settings.command_line import FLAG, NUMBER, OUTPUT, PROCESSES, TRAINING, WHOLE
from stretto.settings.runs import TrainSettings, known
from stretto.system import fork_server

if TYPE_CHECKING:
    from stretto.methods import Method
    from stretto.runtime.launch import LaunchSettings
    from stretto.study.prepare import Prepared
    from stretto.study.single_run import Resume
    from stretto.study.training_run import Task
    from stretto.trainer.trainer import Trainer

PATIENCE = 600.0  # seconds that workers wait for each other unless said otherwise
TRACE = "trace.pftrace"  # in the folder of a run whose operations are recorded


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Whether a run goes on, how it starts processes, and what it does when one fails."""

    resume: Annotated[bool, FLAG] = False
    """Go on from the newest whole checkpoint, on any number of workers. Ctrl-C leaves one; a second Ctrl-C ends the
    run at once."""
    auto_resume: Annotated[bool, FLAG] = False
    """Go on if there is a checkpoint, else begin: for a command that is repeated until the run is finished."""
    restarts: Annotated[int, WHOLE] = 0
    """How often all processes start again after one failed."""
    timeout: Annotated[float | None, NUMBER] = None
    """Seconds that a worker waits for another; by default 600."""
    nodes: Annotated[int, WHOLE] = 1
    """Machines for the workers: start the same command on each. They share the folder."""
    rendezvous: str | None = None
    """Where they meet: HOST:PORT, a free port of one of them."""
    secret_file: Path | None = None
    """File with the job's secret, the same on all nodes; else STRETTO_SECRET. Without one, the first node makes one and
    prints it."""

    def place(self, workers: int | None, *, launched: bool) -> "LaunchSettings | None":
        """Where the run's own processes start; None without --workers, and where another launcher has started them.

        Raises UsageError for options that do not go together.
        """
        from stretto.runtime.launch import LaunchSettings
        from stretto.runtime.rendezvous.signed_store import given_secret

        if self.secret_file is not None and self.rendezvous is None:
            raise UsageError(
                f"--secret-file {self.secret_file}: it is for nodes that meet; give --rendezvous HOST:PORT, too"
            )
        place = LaunchSettings(
            workers=workers or self.nodes,
            nodes=self.nodes,
            rendezvous=self.rendezvous,
            restarts=self.restarts,
            timeout=self.patience,
            secret=None if self.rendezvous is None else given_secret(self.secret_file),
        )
        if self.timeout is not None and workers is None:
            raise UsageError(
                f"--timeout {self.timeout:g}: it is for processes that wait for each other; give --workers, too"
            )
        wanted = self.restarts > 0 or self.nodes > 1 or self.rendezvous is not None
        if wanted and launched:
            raise UsageError(
                "another launcher has started this process: nodes, rendezvous and restarts are its business"
            )
        if wanted and workers is None:
            raise UsageError("nodes, rendezvous and restarts are for processes of a run's own: give --workers, too")
        return None if launched or workers is None else place

    @property
    def going_on(self) -> "Resume":
        """What the flags ask of a checkpoint. Raises UsageError for both."""
        if self.resume and self.auto_resume:
            raise UsageError(
                "--resume and --auto-resume: give one of them; --auto-resume also begins where there is nothing"
            )
        return "auto" if self.auto_resume else self.resume

    @property
    def patience(self) -> float:
        """Seconds that a worker waits for another."""
        return PATIENCE if self.timeout is None else self.timeout


def train(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[TrainSettings, Parameter(name="*")] = TrainSettings(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*"), OUTPUT] = Output(),  # noqa: B008 - frozen
    plan: Annotated[Path | None, TRAINING] = None,
    trace: Annotated[Path | None, OUTPUT] = None,
    trace_operations: Annotated[bool, FLAG, OUTPUT] = False,
    processes: Annotated[ProcessSettings, Parameter(name="*"), PROCESSES] = ProcessSettings(),
    command: Annotated[str | None, Parameter(parse=False)] = None,
) -> int:
    """Train a network once, under one method: every worker emulated in one process, or --workers N processes.

    Leaves run.json, events.jsonl and model.safetensors in a folder of its own.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win.
    plan
        File that stretto plan wrote; options beside it win.
    trace
        File for a trace of the workers, for ui.perfetto.dev (.pftrace).
    trace_operations
        Also record torch's operations in the actions of three steps; by default in the run's folder.
    """
    from stretto.methods.table import check_written

    check_written(settings.method)  # a mistyped one is told before torch is imported
    with interrupts.ending_at_once():
        if settings.workers is not None and not output.dry_run:
            fork_server.prepare()
        import torch

        from stretto.runtime.world import place_in_job, take_place
        from stretto.study.report_page import track_run
        from stretto.study.single_run import claim, default_folder, refuse_full_disk
        from stretto.study.training_run import Task

    going_on = processes.going_on
    take_place(settings.placement)
    rank, launched = place_in_job()  # torchrun or srun may have started several
    if launched > 1:
        settings = replace(settings, workers=settings.workers or launched)
    resolved, chosen = choose_method(settings, output, told=rank == 0 and not output.dry_run, resume=bool(going_on))
    place = processes.place(resolved.workers, launched=launched > 1)
    torch.set_num_threads(resolved.threads)  # as in a study, so that the numbers are the same
    here = place is None and launched == 1 and not output.dry_run
    prepared = prepare_run(resolved, chosen, processes.patience, here=here)
    if output.dry_run:
        if rank == 0:
            print_settings(resolved, output)
        return 0
    if rank == 0:
        tell_beginning(prepared, chosen, output, nodes=processes.nodes)
    folder = output.out or default_folder(resolved)
    trace = folder / TRACE if trace_operations and trace is None else trace
    claimed = claim(folder, resolved, resume=going_on)
    if rank == 0 and (processes.auto_resume or claimed.made):
        output.say(claimed.told)
    if not claimed.made:
        refuse_full_disk(prepared, folder)
        # another launcher's command is the one that was given
        with unfinished(prepared, folder, command if launched == 1 else None):
            task = Task(resolved, folder, timeout=processes.patience, resume=claimed.step > 0, keeps=True)
            warned = prepared.trainer.backend.means.warned
            task = replace(task, trace=trace is not None, operations=trace_operations, warned=warned)
            make_run(task, prepared, place, here=here, silent=output.silent or rank > 0)
        if rank == 0 and processes.nodes == 1:
            track_run(folder, resolved)
    told = trace, trace_operations
    return tell_result(prepared, chosen, folder, rank, told, output, nodes=processes.nodes)


def prepare_run(settings: TrainSettings, chosen: "Method", patience: float, *, here: bool) -> "Prepared":
    """The run, ready to train `here`, or as others will. Raises UsageError for what it could not train or evaluate."""
    from stretto.methods.advice import explained
    from stretto.study.first_batches import refuse_evaluation, refuse_other_sizes
    from stretto.study.prepare import prepare, prepare_trial

    with explained(chosen):
        prepared = (prepare if here else prepare_trial)(settings, patience)
    refuse_other_sizes(prepared)
    refuse_evaluation(prepared)
    return prepared


def choose_method(
    settings: TrainSettings, output: Output, *, told: bool, resume: bool
) -> "tuple[TrainSettings, Method]":
    """The resolved settings, and their method; says what "async" and "local" stand for, where that is to be `told`.

    A run that goes on has the method that it began with.
    """
    from stretto.methods import method
    from stretto.methods.advice import meaning
    from stretto.study.prepare import advice_in, check_rate, resolve
    from stretto.study.single_run import as_begun

    check_rate(settings)
    resolved = resolve(settings)
    begun = as_begun(settings.method, resolved, output.out) if resume else resolved
    chosen = advice_in(settings, begun).get(settings.method)
    if chosen is None or str(chosen) != begun.method:
        chosen = method(begun.method)
    if told and chosen.advice is not None:
        output.say(meaning(chosen))
    elif told and begun.method != resolved.method:
        output.say(
            f"{settings.method} stands for {begun.method} in this run, which goes on; it is {resolved.method} now"
        )
    return begun, chosen


def tell_beginning(prepared: "Prepared", chosen: "Method", output: Output, *, nodes: int) -> None:
    """Say what is to be known of a run, and who does what, if it has more axes than the pipeline, or a placement."""
    from stretto.study.study import notes_on

    for note in notes_on({str(chosen): prepared}, [] if chosen.advice is None else [chosen]):
        output.say(note)
    placement = prepared.settings.placement
    if placement:
        placed = (f"process {rank} is worker {worker}" for rank, worker in enumerate(placement))
        output.say(", ".join(placed))
    if prepared.settings.mesh == Mesh():
        return
    output.say(prepared.trainer.placement.describe(prepared.trainer.schedule.worker_of))
    if nodes == 1:  # else the first worker's machine decides, and its log tells
        tell_algorithm(prepared, output)


def tell_algorithm(prepared: "Prepared", output: Output) -> None:
    """Say which calibration all-reduce(algorithm=auto) goes by; where there is none, the first process warns."""
    sync, replicas = prepared.trainer.sync, prepared.trainer.mesh.data
    reducing = sync.reducing
    if reducing is None or reducing.algorithm != "auto" or prepared.settings.workers is None:
        return
    from stretto.collectives.stored_calibration import basis
    from stretto.runtime.world import machines_of

    ranks = prepared.trainer.placement.replicas_of(0)
    chosen = basis(replicas, machines_of(ranks), reducing.calibration)
    if chosen.calibration is not None:
        output.say(f"{sync} goes by {chosen.words}")


def make_run(task: "Task", prepared: "Prepared", place: "LaunchSettings | None", *, here: bool, silent: bool) -> None:
    """Train: on processes of its own if there is a `place`, as it was prepared if it trains `here` alone.

    Otherwise this process is one of a launcher's, and takes its part.
    """
    from stretto.study import training_run
    from stretto.study.prepare import costs_of
    from stretto.study.run_processes import run_on_processes
    from stretto.trainer.progress import progress

    task, settings = replace(task, costs=costs_of(prepared)), task.settings
    title = f"{settings.model} on {settings.data}, {settings.method}"
    with progress(title, known(settings.steps), silent=silent) as bar:
        advance = training_run.counting(bar.advance)

        def on_step(step: int, loss: float | None) -> None:
            advance(step, loss)
            if loss is not None:
                bar.note = f"loss {loss:.4f}"

        if place is not None:
            run_on_processes(task, place, on_step)
        else:
            training_run.make_run(task, on_step, prepared if here else None)


def tell_result(
    prepared: "Prepared",
    chosen: "Method",
    folder: Path,
    rank: int,
    traced_to: tuple[Path | None, bool],
    output: Output,
    *,
    nodes: int,
) -> int:
    """Write the trace, if asked for, with torch's operations or not, and print the result, in one process alone."""
    from stretto.methods.advice import told_of
    from stretto.study.predicted_runs import phases_of, recordings_of
    from stretto.study.single_run import in_words, summary, traced
    from stretto.study.store import RUN, read_run

    if rank > 0 or (nodes > 1 and not (folder / RUN).is_file()):
        return 0  # another process, or the command on another node, tells the result
    trace, operations = traced_to
    if trace is not None:
        write_trace(
            trace, traced(folder, operations=operations), phases_of(prepared, recordings_of(folder, prepared.settings))
        )
        output.say(f"trace: {trace}")
    result = summary(*read_run(folder), folder)
    if output.json:
        print_json(result | {"method": str(chosen), **told_of(chosen)})
    else:
        output.say(in_words(result))
    if result["status"] == "diverged":
        at_once = "look for NaN in the data and in the loss function, or " if result["steps"] == 1 else ""
        remedy = f"{at_once}try a smaller --lr{remedies_of_delay(prepared.trainer)}"
        print(f"stretto: the loss was not finite after step {result['steps']}: {remedy}", file=sys.stderr)
        return 1
    return 0


def remedies_of_delay(trainer: "Trainer") -> str:
    """Further remedies for a diverged run with gradients more than one update old."""
    oldest = max(trainer.method.delays(trainer.schedule).steady)
    if oldest < 2:
        return ""
    return (
        f", as gradients {oldest} updates old bear smaller rates than new ones, or --method pipedream-2bw, where they "
        "are one update old"
    )


@contextmanager
def unfinished(prepared: "Prepared", folder: Path, command: str | None) -> Iterator[None]:
    """When the run does not come to its end, say what is kept, and how to go on: by that command, if it is known."""
    from stretto.runtime.launch import WorkerFailedError
    from stretto.study.checkpoints import Checkpoints
    from stretto.study.store import RUN, FullDiskError, discard

    try:
        yield
    except (KeyboardInterrupt, WorkerFailedError, FullDiskError) as error:
        interrupted = isinstance(error, KeyboardInterrupt) or interrupts.received()  # a job's signal hits workers, too
        if interrupted and (folder / RUN).is_file():
            interrupts.answered(said=False)  # its processes had made the last step
            return
        step = Checkpoints(prepared.settings, folder).last()
        if step is None and interrupted:
            discard(folder)
            raise KeyboardInterrupt(
                "interrupted before a checkpoint; nothing is kept, the same command begins again"
            ) from None
        if step is None:
            raise
        automatic = command is not None and " --auto-resume" in command
        with_option = "" if automatic else " with --resume"
        remedy = f"the same command{with_option} goes on from the checkpoint of step {step}"
        if command is not None and not automatic and " --resume" not in command:
            remedy += f": {command} --resume"
        what = "interrupted" if interrupted else str(error)
        raise (KeyboardInterrupt if interrupted else type(error))(f"{what}; {remedy}") from None
