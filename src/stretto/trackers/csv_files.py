"""Tables in plain files: `logs/<run>/metrics.csv`, a row a step, beside settings.json and schedule.txt."""

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stretto.errors import UsageError
from stretto.system.destinations import write_whole
from stretto.trackers.tracker import LocalTracker, Row, RunDescription, TrackerRun

METRICS, SETTINGS, SCHEDULE = "metrics.csv", "settings.json", "schedule.txt"


@dataclass(frozen=True, kw_only=True)
class CSV(LocalTracker):
    """Files in `folder`, one folder for each run (and study)."""

    name: ClassVar[str] = "csv"

    def open(self, run: RunDescription) -> TrackerRun:
        """Write settings and schedule, and begin or go on with the table."""
        return CSVRun(self.folder_of(run), run)


class CSVRun(TrackerRun):
    """The files of one run."""

    def __init__(self, folder: Path, run: RunDescription) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.id = str(folder)
        self._file = folder / METRICS
        self._folder = folder
        if CSV.name not in run.ids:
            if any(folder.iterdir()) and not self._file.is_file():
                raise UsageError(f"{folder} is there already and holds no {METRICS}: choose another csv(folder=...)")
            write_whole(folder / SETTINGS, json.dumps(run.settings, indent=1, default=str) + "\n")
            write_whole(folder / SCHEDULE, run.schedule + "\n")
        kept = [row for row in self._read() if int(row["step"]) <= run.since]  # later ones are trained again
        self._columns = list(kept[0]) if kept else ["step"]
        self._rewrite(kept)  # of a run that does not go on nothing is kept

    def write(self, rows: Sequence[Row]) -> None:
        """Append a line for each row; a new column rewrites the file."""
        new = [key for _, values in rows for key in values if key not in self._columns]
        if new:
            self._columns += dict.fromkeys(new)
            self._rewrite(self._read())
        with self._file.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows({"step": step, **values} for step, values in rows)

    def _read(self) -> list[dict[str, str]]:
        if not self._file.is_file():
            return []
        with self._file.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, rows: Sequence[dict[str, str]]) -> None:
        partial = self._file.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self._file)

    def add_file(self, path: Path) -> None:
        """Copy the file into the run's folder."""
        shutil.copy(path, self._folder / path.name)

    def close(self, *, finished: bool) -> None:
        """Join the rows of each step: some values are known later than others."""
        joined: dict[int, dict[str, str]] = {}
        for row in self._read():
            joined.setdefault(int(row["step"]), {}).update({key: value for key, value in row.items() if value})
        self._rewrite([row for _, row in sorted(joined.items())])
