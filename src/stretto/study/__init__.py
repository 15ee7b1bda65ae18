"""Runs and studies of runs: settings in, plain files and a report out."""

from stretto.study.compare import Outcome, Study, compare, open_study, read_study, resolve_study, write_report
from stretto.study.run import run

__all__ = ["Outcome", "Study", "compare", "open_study", "read_study", "resolve_study", "run", "write_report"]
