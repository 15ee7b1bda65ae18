"""stretto train: one run, emulated in one process or on several."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.cli.output import Output, print_json, print_settings, write_trace
from stretto.cli.progress import progress
from stretto.config import TrainSettings, known

if TYPE_CHECKING:
    from stretto.study.prepare import Prepared


def train(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[TrainSettings, Parameter(name="*")] = TrainSettings(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),  # noqa: B008 - frozen
    trace: Path | None = None,
) -> int:
    """Train a network once, under one method: every worker emulated in one process, or --workers N processes.

    Leaves run.json, events.jsonl and model.safetensors in a folder of its own.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win.
    trace
        File for a trace that ui.perfetto.dev shows (.pftrace): what each worker did, and when. `stretto report` then
        has a timeline, too.
    """
    import torch

    from stretto.runtime.world import place_in_job
    from stretto.study.prepare import prepare, resolve
    from stretto.study.single import claim, default_folder, summary, traced
    from stretto.study.store import read_run
    from stretto.team import alone

    rank, processes = place_in_job()  # torchrun or srun may have started several
    if processes > 1:
        settings = replace(settings, workers=settings.workers or processes)
    resolved = resolve(settings)
    with alone():
        prepared = prepare(resolved)
    if output.dry_run:
        if rank == 0:
            print_settings(resolved, output)
        return 0
    folder = output.out or default_folder(resolved)
    torch.set_num_threads(1)  # as in a study, so that the numbers are the same
    if claim(folder, resolved):
        make(prepared, folder, launched=processes > 1, silent=output.silent or rank > 0, trace=trace is not None)
    elif rank == 0:
        output.say(f"{folder}: this run is finished already")
    if rank > 0:
        return 0
    if trace is not None:
        write_trace(trace, traced(folder))
        output.say(f"trace: {trace}")
    result = summary(*read_run(folder), folder)
    if output.json:
        print_json(result)
    else:
        output.say("\n".join(f"{key:<17} {value}" for key, value in result.items() if value is not None))
    return 0


def make(prepared: "Prepared", folder: Path, *, launched: bool, silent: bool, trace: bool) -> None:
    """Make the run: here, or on processes of its own if it wants some and no launcher has `launched` this one."""
    from stretto.runtime.launch import Place
    from stretto.study import run
    from stretto.study.job import run_on_processes
    from stretto.study.prepare import costs_of

    settings, costs = prepared.settings, costs_of(prepared)
    title = f"{settings.model} on {settings.data}, {settings.method}"
    done = 0
    with progress(title, known(settings.steps), silent=silent) as bar:

        def on_step(step: int, loss: float | None) -> None:
            nonlocal done
            bar.advance(step - done)
            done = step
            if loss is not None:
                bar.note(f"loss {loss:.4f}")

        if settings.workers is None or launched:
            run(settings, folder, on_step, trace=trace, costs=costs)
        else:
            run_on_processes(settings, folder, on_step, Place(workers=settings.workers), costs, trace=trace)
