"""Experiment trackers that people have: one run of theirs for one run of ours. No torch.

To add one: a file here with a `Tracker` and its `TrackerRun`, and a line in `table.py`.
"""

from stretto.trackers.csv_files import CSV
from stretto.trackers.mlflow import MLflow
from stretto.trackers.table import find
from stretto.trackers.tensorboard import TensorBoard
from stretto.trackers.tracker import RunDescription, Tracker, TrackerRun
from stretto.trackers.weights_and_biases import WandB

__all__ = ["CSV", "MLflow", "RunDescription", "TensorBoard", "Tracker", "TrackerRun", "WandB", "find"]
