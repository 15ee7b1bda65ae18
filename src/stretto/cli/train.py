"""stretto train: one run, emulated on one device."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.cli.output import Output, print_json, print_settings, write_trace
from stretto.cli.progress import progress
from stretto.config import TrainSettings, known


def train(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[TrainSettings, Parameter(name="*")] = TrainSettings(),  # noqa: B008 - frozen
    output: Annotated[Output, Parameter(name="*")] = Output(),  # noqa: B008 - frozen
    trace: Path | None = None,
) -> int:
    """Train a network once, under one method, every worker emulated on one device.

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

    from stretto.study.prepare import prepare, resolve
    from stretto.study.single import claim, default_folder, summary, traced
    from stretto.study.store import read_run

    resolved = resolve(settings)
    prepare(resolved)
    if output.dry_run:
        print_settings(resolved, output)
        return 0
    folder = output.out or default_folder(resolved)
    torch.set_num_threads(1)  # as in a study, so that the numbers are the same
    if claim(folder, resolved):
        from stretto.study import run

        title = f"{resolved.model} on {resolved.data}, {resolved.method}"
        with progress(title, known(resolved.steps), silent=output.silent) as bar:

            def on_step(_: int, loss: float | None) -> None:
                bar.advance(1)
                if loss is not None:
                    bar.note(f"loss {loss:.4f}")

            run(resolved, folder, on_step, trace=trace is not None)
    else:
        output.say(f"{folder}: this run is finished already")
    if trace is not None:
        write_trace(trace, traced(folder))
        output.say(f"trace: {trace}")
    result = summary(*read_run(folder), folder)
    if output.json:
        print_json(result)
    else:
        output.say("\n".join(f"{key:<17} {value}" for key, value in result.items() if value is not None))
    return 0
