"""stretto report: one HTML page from runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.cli.output import Output, print_json
from stretto.files.destinations import check_folder
from stretto.settings.command_line import FLAG
from stretto.settings.trusted import Trusted


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
    from stretto.report import summarize
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
    output.say(table(summarize(outcome.records)))
    if study.pending:
        output.say(f"{len(study.pending)} of {len(study.tasks)} runs are not finished yet")
    output.say(f"report: {outcome.report}")
