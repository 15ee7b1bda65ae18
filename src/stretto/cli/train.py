"""stretto train: one run, emulated in one process or on several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.cli.output import FLAG, Output, print_json, print_settings, write_trace
from stretto.cli.progress import progress
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.processes import fork_server
from stretto.settings.command_line import NUMBER, WHOLE
from stretto.settings.runs import TrainSettings, known

if TYPE_CHECKING:
    from stretto.runtime.launch import LaunchSettings
    from stretto.study.prepare import Prepared


PATIENT = 600.0  # seconds that workers wait for each other unless said otherwise


def train(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[TrainSettings, Parameter(name="*")] = TrainSettings(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),  # noqa: B008 - frozen
    plan: Path | None = None,
    trace: Path | None = None,
    resume: Annotated[bool, FLAG] = False,
    restarts: Annotated[int, WHOLE] = 0,
    timeout: Annotated[float | None, NUMBER] = None,
    nodes: Annotated[int, WHOLE] = 1,
    rendezvous: str | None = None,
    secret_file: Path | None = None,
    command: Annotated[str | None, Parameter(parse=False)] = None,
) -> int:
    """Train a network once, under one method: every worker emulated in one process, or --workers N processes.

    Leaves run.json, events.jsonl and model.safetensors in a folder of its own.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win.
    plan
        File that stretto plan wrote: method, stages, workers, batch size, model. Options beside it win.
    trace
        File for a trace that ui.perfetto.dev shows (.pftrace): what each worker did, and when. `stretto report` then
        has a timeline, too.
    resume
        Go on from the newest checkpoint that is whole, on any number of workers. Ctrl-C and SIGTERM leave one after the
        step that is under way, also without --checkpoint-every; the second time they end the run at once.
    restarts
        How often all processes are started again when one of them fails; they go on from the newest checkpoint.
    timeout
        Seconds that a worker waits for another (600 unless said otherwise); then the attempt has failed. A worker that
        hangs is ended with it.
    nodes
        Machines that the workers are spread over: start the same command on each of them. They share the folder.
    rendezvous
        Where they meet: HOST:PORT, a free port of one of them.
    secret_file
        File with the secret of the job, the same on all nodes; else it is in STRETTO_SECRET. Where none is given, the
        first node makes one and prints it for the others.
    """
    if settings.workers is not None and not output.dry_run:
        fork_server.prepare()
    import torch

    from stretto.runtime.world import place_in_job
    from stretto.study.prepare import prepare, resolve
    from stretto.study.single_run import claim, default_folder, summary, traced
    from stretto.study.store import RUN, read_run
    from stretto.trainer.backend import alone

    rank, processes = place_in_job()  # torchrun or srun may have started several
    if processes > 1:
        settings = replace(settings, workers=settings.workers or processes)
    resolved = resolve(settings)
    place = place_of(
        resolved,
        nodes=nodes,
        rendezvous=rendezvous,
        secret_file=secret_file,
        restarts=restarts,
        timeout=timeout,
        launched=processes > 1,
    )
    with alone():
        prepared = prepare(resolved)
    if output.dry_run:
        if rank == 0:
            print_settings(resolved, output)
        return 0
    if resolved.mesh != Mesh() and rank == 0:
        output.say(prepared.trainer.placement.describe(prepared.trainer.schedule.worker_of))
        if nodes == 1:  # else the first worker's machine decides, and its log tells
            tell_algorithm(prepared, output)
    folder = output.out or default_folder(resolved)
    torch.set_num_threads(1)  # as in a study, so that the numbers are the same
    if claim(folder, resolved, resume=resume):
        silent = output.silent or rank > 0
        patience = PATIENT if timeout is None else timeout
        make(
            prepared,
            folder,
            place,
            silent=silent,
            trace=trace is not None,
            resume=resume,
            timeout=patience,
            command=command if processes == 1 else None,
        )  # another launcher's command is the one that was given
    elif rank == 0:
        output.say(f"{folder}: this run is finished already")
    if rank > 0 or (nodes > 1 and not (folder / RUN).is_file()):
        return 0  # another process, or the command on another node, tells the result
    if trace is not None:
        write_trace(trace, traced(folder))
        output.say(f"trace: {trace}")
    result = summary(*read_run(folder), folder)
    if output.json:
        print_json(result)
    else:
        output.say("\n".join(f"{key:<17} {value}" for key, value in result.items() if value is not None))
    return 0


def tell_algorithm(prepared: "Prepared", output: Output) -> None:
    """Say which calibration all-reduce(algorithm=auto) goes by; where there is none, the first process warns."""
    from stretto.replicas import AllReduce

    sync, replicas = prepared.trainer.sync, prepared.trainer.mesh.data
    if not isinstance(sync, AllReduce) or sync.algorithm != "auto" or prepared.settings.workers is None:
        return
    from stretto.collectives.stored_calibration import basis
    from stretto.runtime.world import machines_of

    ranks = prepared.trainer.placement.replicas_of(0)
    found = basis(replicas, machines_of(ranks), sync.calibration)
    if found.calibration is not None:
        output.say(f"{sync} goes by {found.words}")


def place_of(
    settings: TrainSettings,
    *,
    nodes: int,
    rendezvous: str | None,
    secret_file: Path | None,
    restarts: int,
    timeout: float | None,
    launched: bool,
) -> "LaunchSettings | None":
    """Where processes of the run's own go; None if it is to have none. Raises UsageError for what cannot be."""
    from stretto.runtime.launch import LaunchSettings
    from stretto.runtime.rendezvous.signed_store import given_secret

    if secret_file is not None and rendezvous is None:
        raise UsageError(f"--secret-file {secret_file}: it is for nodes that meet; give --rendezvous HOST:PORT, too")
    secret = None if rendezvous is None else given_secret(secret_file)
    place = LaunchSettings(
        workers=settings.workers or nodes,
        nodes=nodes,
        rendezvous=rendezvous,
        restarts=restarts,
        timeout=PATIENT if timeout is None else timeout,
        secret=secret,
    )
    if timeout is not None and settings.workers is None:
        raise UsageError(f"--timeout {timeout:g}: it is for processes that wait for each other; give --workers, too")
    wanted = restarts > 0 or nodes > 1 or rendezvous is not None
    if wanted and launched:
        raise UsageError("another launcher has started this process: nodes, rendezvous and restarts are its business")
    if wanted and settings.workers is None:
        raise UsageError("nodes, rendezvous and restarts are for processes of a run's own: give --workers, too")
    return None if launched or settings.workers is None else place


def make(
    prepared: "Prepared",
    folder: Path,
    place: "LaunchSettings | None",
    *,
    silent: bool,
    trace: bool,
    resume: bool,
    timeout: float,
    command: str | None,
) -> None:
    """Make the run, in this process or on processes of its own."""
    from stretto.study import run
    from stretto.study.launch import run_on_processes
    from stretto.study.prepare import costs_of

    settings, costs = prepared.settings, costs_of(prepared)
    title = f"{settings.model} on {settings.data}, {settings.method}"
    done = 0
    with going_on(prepared, folder, command), progress(title, known(settings.steps), silent=silent) as bar:

        def on_step(step: int, loss: float | None) -> None:
            nonlocal done
            bar.advance(step - done)
            done = step
            if loss is not None:
                bar.note(f"loss {loss:.4f}")

        if place is None:
            run(settings, folder, on_step, trace=trace, costs=costs, resume=resume, timeout=timeout, keeps=True)
        else:
            run_on_processes(settings, folder, on_step, place, costs, trace=trace, resume=resume, keeps=True)


@contextmanager
def going_on(prepared: "Prepared", folder: Path, command: str | None) -> Iterator[None]:
    """When the run does not come to its end, say what is kept, and how to go on: by that command, if it is known."""
    from stretto.runtime.launch import WorkerFailedError
    from stretto.study.checkpoints import Checkpoints
    from stretto.study.disk_errors import FullDiskError

    try:
        yield
    except (KeyboardInterrupt, WorkerFailedError, FullDiskError) as error:
        step = Checkpoints(prepared.settings, folder).last()
        interrupted = isinstance(error, KeyboardInterrupt)
        if step is None and interrupted:
            raise KeyboardInterrupt(
                "interrupted before a checkpoint; nothing is kept, the same command begins again"
            ) from None
        if step is None:
            raise
        remedy = f"the same command with --resume goes on from the checkpoint of step {step}"
        if command is not None and " --resume" not in command:
            remedy += f": {command} --resume"
        what = "interrupted" if interrupted else str(error)
        raise type(error)(f"{what}; {remedy}") from None
