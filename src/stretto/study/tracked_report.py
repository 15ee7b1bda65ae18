"""The report in the trackers of a run or of a study, once it is written."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.errors import UsageError
from stretto.options.extras import missing
from stretto.settings.runs import TrainSettings
from stretto.study.report_page import write_report
from stretto.study.store import read_run
from stretto.study.study import Study, read_study
from stretto.trackers import RunDescription, Tracker, find
from stretto.trackers.tracked_run import TrackedRun

PICTURES = ("frontier.svg", "frontier.png")


def prepare_trackers(study: Study) -> None:
    """Do, before the runs of a study, what trackers do once; one that fails is told by the runs."""
    for tracker in find(study.settings.log):
        try:
            tracker.prepare(study.out.name)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the study goes on
            tell(f"tracker {tracker.name} could not be prepared ({type(error).__name__}: {error})")


def track_study(study: Study, report: Path) -> None:
    """Add the report of a study to its trackers, as a run of its own beside those of the study."""
    files = [report, *(report.with_name(name) for name in PICTURES if report.with_name(name).is_file())]
    description = RunDescription("report", study.settings.to_show(), group=study.out.name)
    add_files(find(study.settings.log), description, files)


def track_run(folder: Path, settings: TrainSettings) -> None:
    """Add the report of a finished run to the run that its trackers have of it."""
    trackers = find(settings.log)
    run, record = read_run(folder)
    ids: Mapping[str, str] = run.get("trackers", {})
    known = [tracker for tracker in trackers if tracker.name in ids]
    if not known or missing("report"):
        return
    try:
        report = write_report(read_study(folder, settings.functions.values()))
    except UsageError as error:
        tell(f"the run's report is not added to {', '.join(ids)}: {error}")
        return
    description = RunDescription(folder.name, ids=ids, since=settings.steps or 0)  # all of its rows are kept
    add_files(known, description, [report], finished=record.status == "finished")


def add_files(
    trackers: Sequence[Tracker], description: RunDescription, files: Sequence[Path], *, finished: bool = True
) -> None:
    """Open a run in trackers, add files to it, and end it: `finished`, or else as failed."""
    run = TrackedRun(trackers, description, tell)
    for file in files:
        run.add_file(file)
    run.close(finished=finished)


def tell(text: str) -> None:
    """Print a line on stderr."""
    print(f"stretto: {text}", file=sys.stderr, flush=True)
