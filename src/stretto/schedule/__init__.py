"""Every worker's actions in order. No torch in here.

The idea everything else stands on: a schedule is data, and `Rules` in `dataflow.py` say once what its actions mean.
"""

from stretto.schedule.action import KINDS, Action, Span
from stretto.schedule.csv_file import read_csv, to_csv
from stretto.schedule.dataflow import Edge, Rules
from stretto.schedule.delay import Delays
from stretto.schedule.reach import Reach
from stretto.schedule.schedule import Schedule
from stretto.schedule.validity import check

__all__ = ["KINDS", "Action", "Delays", "Edge", "Reach", "Rules", "Schedule", "Span", "check", "read_csv", "to_csv"]
