"""stretto inspect: what stages learn, by a run's own measurements."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.cli.output import Output, aligned, print_json
from stretto.errors import UsageError
from stretto.files.destinations import check_folder
from stretto.settings.command_line import FLAG
from stretto.settings.trusted import Trusted


def inspect(
    folder: Path,
    /,
    *,
    trusted: Annotated[Trusted, Parameter(name="*")] = Trusted(),  # noqa: B008 - frozen
    json: Annotated[bool, FLAG] = False,
    quiet: Annotated[bool, FLAG] = False,
) -> None:
    """Look into a run, or the best run of every method of a study: delays, heads, losses, cosines, probes, filters.

    What was not measured while it trained (`--measure cosine,probes,filters`) is said to be missing.

    Parameters
    ----------
    folder
        What `stretto train` or `stretto compare` has written; the page goes there, too.
    json
        Print one JSON object on stdout, nothing else.
    quiet
        Print nothing.
    """
    from stretto.report.inspection import HEADS
    from stretto.study import read_study
    from stretto.study.inspected_runs import inspect_study, write_inspection

    study = read_study(folder, trusted.functions)
    check_folder(folder, "folder: copy it to one that can be written")
    runs = inspect_study(study)
    if not runs:
        raise UsageError(f"nothing to inspect in {folder}: none of its {len(study.tasks)} runs is finished")
    page = write_inspection(study, runs)
    if json:
        print_json({"runs": [run.to_json() for run in runs], "report": str(page)})
        return
    output = Output(quiet=quiet)
    for run in runs:
        output.say(f"{run.record.method}: {run.outcome}\n")
        narrow = [row[:1] + row[2:] for row in (HEADS, *run.rows)]  # without the modules: a terminal has 80 columns
        output.say(aligned(narrow))
        for text in run.missing:
            output.say(f"not measured: {text}")
        output.say("")
    output.say(f"report: {page}")
