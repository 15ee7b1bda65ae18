"""The report: one HTML page from finished runs, with frontiers of cost and time, summaries, learning curves, tuning.

Everything here is a pure function of `Record`s, except `build`, which writes the page. Each section of the page is one
file with a function `section`, which returns the template's variables. The chart and template libraries load when
`build` is called.
"""

from stretto.report.html import build
from stretto.report.metric import METRICS, TRAIN_LOSS, VALIDATION_ACCURACY, VALIDATION_LOSS, Metric
from stretto.report.page import Page
from stretto.report.panel import Arrival, Panel, panels
from stretto.report.record import Point, Record
from stretto.report.summary import MethodSummary, summarize

__all__ = [
    "METRICS",
    "TRAIN_LOSS",
    "VALIDATION_ACCURACY",
    "VALIDATION_LOSS",
    "Arrival",
    "MethodSummary",
    "Metric",
    "Page",
    "Panel",
    "Point",
    "Record",
    "build",
    "panels",
    "summarize",
]
