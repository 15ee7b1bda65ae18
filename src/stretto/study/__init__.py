"""Runs and studies of runs: settings in, plain files and a report out."""

from stretto.study.comparison import Outcome, compare
from stretto.study.report_page import write_report
from stretto.study.study import Study, open_study, read_study, resolve_study
from stretto.study.training_run import run

__all__ = ["Outcome", "Study", "compare", "open_study", "read_study", "resolve_study", "run", "write_report"]
