"""Which worker does what, in which order. No torch in here.

The idea everything else stands on: a schedule is data, and `Rules` in `dataflow.py` say once what its actions mean.
"""

from stretto.schedule.action import KINDS, Action
from stretto.schedule.dataflow import Edge, Rules
from stretto.schedule.delay import Delays
from stretto.schedule.reach import Reach
from stretto.schedule.read_csv_file import read_csv
from stretto.schedule.schedule import Schedule
from stretto.schedule.timed_action import Span
from stretto.schedule.validity import check
from stretto.schedule.write_csv_file import to_csv

__all__ = ["KINDS", "Action", "Delays", "Edge", "Reach", "Rules", "Schedule", "Span", "check", "read_csv", "to_csv"]
