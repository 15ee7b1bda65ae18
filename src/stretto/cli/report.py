"""stretto report and inspect: pages of runs that are finished."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.cli.output import Output, aligned, print_json
from stretto.errors import UsageError
from stretto.settings.command_line import FLAG, Trusted
from stretto.system.destinations import check_folder


def report(
    folder: Path,
    /,
    *,
    cluster: str | None = None,
    trusted: Annotated[Trusted, Parameter(name="*")] = Trusted(),  # noqa: B008 - frozen
    json: Annotated[bool, FLAG] = False,
    quiet: Annotated[bool, FLAG] = False,
) -> None:
    """Make the page of a study (or of a single run) again, from whatever runs are finished by now.

    Parameters
    ----------
    folder
        What `stretto compare` or `stretto train` has written.
    cluster
        A cluster's name, or its file: runs with a trace are compared with what their stages cost there, and not with a
        simulation of their own action times.
    json
        Print one JSON object on stdout, nothing else.
    quiet
        Print nothing.
    """
    from stretto.cost import find_cluster
    from stretto.report.terminal import table
    from stretto.study import Outcome, read_study, write_report

    study = read_study(folder, trusted.functions)
    check_folder(folder, "folder: copy it to one that can be written")
    page = write_report(study, cluster=None if cluster is None else find_cluster(cluster))
    outcome = Outcome(study.records(), (), page, study.left_out)
    if json:
        print_json(outcome.to_json())
        return
    output = Output(quiet=quiet)
    output.say(table(outcome.records))
    if study.pending:
        output.say(f"{len(study.pending)} of {len(study.tasks)} runs are not finished yet")
    output.say(f"report: {outcome.report}")


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
    from stretto.study.report_page import inspect_study, write_inspection

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
