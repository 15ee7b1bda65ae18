"""stretto inspect: what stages learn, by a run's own measurements."""

from pathlib import Path
from typing import Annotated

from stretto.cli.output import FLAG, Output, aligned, print_json


def inspect(
    folder: Path,
    /,
    *,
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
    from stretto.errors import UsageError
    from stretto.report.inspection import HEADS
    from stretto.study import read_study
    from stretto.study.inspected_runs import inspect_study, write_inspection

    study = read_study(folder)
    found = inspect_study(study)
    if not found:
        raise UsageError(f"nothing to inspect in {folder}: none of its {len(study.tasks)} runs is finished")
    page = write_inspection(study, found)
    if json:
        print_json({"runs": [each.to_json() for each in found], "report": str(page)})
        return
    output = Output(quiet=quiet)
    for each in found:
        output.say(f"{each.record.method}: {each.outcome}\n")
        output.say(
            aligned([row[:1] + row[2:] for row in (HEADS, *each.rows)])
        )  # 80 columns have no room for what it is
        for text in each.missing:
            output.say(f"not measured: {text}")
        output.say("")
    output.say(f"report: {page}")
