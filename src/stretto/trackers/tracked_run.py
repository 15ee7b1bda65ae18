"""One run in all the trackers that were asked for. One that fails is told once and dropped."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.trackers.tracker import Row, RunDescription, Tracker, TrackerRun

FLUSH = 1.0  # seconds between two writes, at least


class TrackedRun:
    """The writer of a run: there is one, whatever the number of processes that train.

    `tell` is called with a sentence where a tracker fails; training goes on without it.
    """

    def __init__(self, trackers: Sequence[Tracker], run: RunDescription, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._open: dict[str, TrackerRun] = {}
        self._rows: dict[int, dict[str, float]] = {}
        self._written_at = time.monotonic()
        for tracker in trackers:
            self._attempt(tracker.name, lambda tracker=tracker: self._begin(tracker, run))  # type: ignore[misc]

    def _begin(self, tracker: Tracker, run: RunDescription) -> None:
        self._open[tracker.name] = tracker.open(run)

    @property
    def ids(self) -> Mapping[str, str]:
        """What this run is called in each tracker: a checkpoint keeps it, so that a resumed run goes on there."""
        return {name: run.id for name, run in self._open.items()}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values under a step; they are passed on once a second."""
        self._rows.setdefault(step, {}).update(values)
        if time.monotonic() > self._written_at + FLUSH:
            self.flush()

    def flush(self) -> None:
        """Pass on all rows that are waiting."""
        rows: list[Row] = sorted(self._rows.items())
        self._rows, self._written_at = {}, time.monotonic()
        if rows:
            self._each(lambda run: run.write(rows))

    def add_file(self, path: Path) -> None:
        """Keep a copy of a file with the run."""
        self._each(lambda run: run.add_file(path))

    def close(self, *, finished: bool) -> None:
        """Pass on what is left, and end the run."""
        self.flush()
        self._each(lambda run: run.close(finished=finished))
        self._open = {}

    def _each(self, call: Callable[[TrackerRun], None]) -> None:
        for name, run in list(self._open.items()):
            self._attempt(name, lambda run=run: call(run))  # type: ignore[misc]

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, it is told and training goes on
            self._open.pop(name, None)
            self._tell(
                f"tracker {name} failed ({type(error).__name__}: {error}): it gets nothing more of this run; training "
                "goes on"
            )
