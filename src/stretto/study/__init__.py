"""Runs and studies of runs: settings in, plain files and a report out.

The live page is written by a process of its own: with `--jobs 1` the study trains in the command's process. The train
loss of a report is evaluated on 512 training examples in evaluation mode, the same for all methods.

Trackers: a tracker gets one run from the first process. What other processes know is sent to it by a channel of its
own every so many steps, and read `lag` steps later: a collective there would make an asynchronous pipeline wait for
its slowest worker.
"""

from typing import TYPE_CHECKING

from stretto.options.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto.study.comparison import Outcome, compare
    from stretto.study.report_page import write_report
    from stretto.study.study import Study, open_study, read_study, resolve_study
    from stretto.study.training_run import run

__all__ = ["Outcome", "Study", "compare", "open_study", "read_study", "resolve_study", "run", "write_report"]

_HOMES = {
    "Outcome": "stretto.study.comparison",
    "Study": "stretto.study.study",
    "compare": "stretto.study.comparison",
    "open_study": "stretto.study.study",
    "read_study": "stretto.study.study",
    "resolve_study": "stretto.study.study",
    "run": "stretto.study.training_run",
    "write_report": "stretto.study.report_page",
}

__getattr__ = lazy_names(__name__, _HOMES)  # plans use this folder's costs of models, and train nothing
