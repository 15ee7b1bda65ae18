"""The trackers by name."""

from collections.abc import Sequence
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import refuse
from stretto.options.named import find_choice
from stretto.trackers.csv_files import CSV
from stretto.trackers.mlflow import MLflow
from stretto.trackers.tensorboard import TensorBoard
from stretto.trackers.tracker import Tracker
from stretto.trackers.weights_and_biases import WandB

TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in (TensorBoard, WandB, MLflow, CSV)}
FORMS = f"{', '.join(TRACKERS)}, a stretto.trackers.Tracker, or several"


def find(given: Any, where: str = "log", also: str = "") -> tuple[Tracker, ...]:
    """The trackers that a user gave: a name such as "tensorboard" or "wandb(project=mine)", a Tracker, or several.

    Raises UsageError for an unknown one, one whose package is not installed, and two of one name; it says `where` they
    were given, and what `also` could be.
    """
    several = [given] if isinstance(given, str | Tracker) else given
    if not isinstance(several, Sequence):
        refuse(where, given, FORMS + also)
    trackers: list[Tracker] = []
    for each in several:
        if not isinstance(each, str | Tracker):
            refuse(where, given, FORMS + also)
        tracker = find_choice(each, "tracker", TRACKERS) if isinstance(each, str) else each
        if tracker.name in {other.name for other in trackers}:
            raise UsageError(f"{where}: {tracker.name} is given twice")
        tracker.require(where)
        trackers.append(tracker)
    return tuple(trackers)
