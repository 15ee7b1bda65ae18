"""Runs and studies of runs: settings in, plain files and a report out."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.study.comparison import Outcome, compare
    from stretto.study.report_page import write_report
    from stretto.study.study import Study, open_study, read_study, resolve_study
    from stretto.study.training_run import run

__all__ = ["Outcome", "Study", "compare", "open_study", "read_study", "resolve_study", "run", "write_report"]

_HOMES = {
    "Outcome": "comparison",
    "Study": "study",
    "compare": "comparison",
    "open_study": "study",
    "read_study": "study",
    "resolve_study": "study",
    "run": "training_run",
    "write_report": "report_page",
}


def __getattr__(name: str) -> Any:
    """Import a name from its file on first use: plans use this folder's costs of models, and train nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.study' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"stretto.study.{_HOMES[name]}"), name)
