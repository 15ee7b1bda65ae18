"""MLflow: one run there for one run here, by its client; nothing global is set."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stretto.system.destinations import check_file
from stretto.trackers.tracker import Row, RunDescription, Tracker, TrackerRun, flat, grouped

MOST_VALUES = 1000  # of one call
SQLITE = "sqlite:///"
LONGEST = 500  # characters of a parameter that every server keeps


@dataclass(frozen=True, kw_only=True)
class MLflow(Tracker):
    """A tracking server or a database, `uri`: MLFLOW_TRACKING_URI or sqlite:///mlflow.db unless said otherwise.

    Runs are in `experiment`: named after their study, or "stretto", unless said otherwise.
    """

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str | None] = "mlflow"
    uri: str | None = None
    experiment: str | None = None

    def require(self, where: str) -> None:
        """Also raise UsageError if a database in a file cannot be written."""
        super().require(where)
        if (address := self.address).startswith(SQLITE):
            check_file(Path(address.removeprefix(SQLITE)))

    @property
    def address(self) -> str:
        """The server or database that is meant."""
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}mlflow.db"

    def prepare(self, group: str) -> None:
        """Make the database and the experiment."""
        with quiet():
            self.experiment_id(self.client(), group)

    def open(self, run: RunDescription) -> TrackerRun:
        """Begin a run, or go on with the one of that id."""
        with quiet():
            return MLflowRun(self, run)

    def client(self) -> Any:
        """A client of the server or database."""
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.address)

    def experiment_id(self, client: Any, group: str | None) -> str:
        """The experiment's id; it is made if it is not there."""
        name = self.experiment or group or "stretto"
        found = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if found is None else found.experiment_id)


class MLflowRun(TrackerRun):
    """One run of MLflow."""

    def __init__(self, options: MLflow, run: RunDescription) -> None:
        from mlflow.entities import Param

        self._client = options.client()
        if options.name in run.ids:
            self.id = run.ids[options.name]
            self._client.set_terminated(self.id, "RUNNING")
            return
        experiment = options.experiment_id(self._client, run.group)
        self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)[:LONGEST]) for key, value in flat(run.settings).items()]
        self._client.log_batch(self.id, params=params)
        if run.schedule:
            self._client.log_text(self.id, run.schedule + "\n", "schedule.txt")

    def write(self, rows: Sequence[Row]) -> None:
        """Log all values of the rows, each under its own step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(grouped(key), float(value), now, step) for step, row in rows for key, value in row.items()]
        for start in range(0, len(values), MOST_VALUES):
            self._client.log_batch(self.id, metrics=values[start : start + MOST_VALUES])

    def add_file(self, path: Path) -> None:
        """Log an artifact."""
        self._client.log_artifact(self.id, str(path))

    def close(self, *, finished: bool) -> None:
        """End the run."""
        self._client.set_terminated(self.id, "FINISHED" if finished else "FAILED")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what makes the tables of a new database from telling each of its steps."""
    import mlflow  # noqa: F401 - which sets the level of its logger

    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
