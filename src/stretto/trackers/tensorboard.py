"""TensorBoard: event files in `logs/<run>`, shown by `tensorboard --logdir logs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stretto.trackers.tracker import LocalTracker, Row, RunDescription, TrackerRun, flat, grouped


@dataclass(frozen=True, kw_only=True)
class TensorBoard(LocalTracker):
    """Event files in `folder`, a folder for each run (and study), by torch's SummaryWriter."""

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str | None] = "tensorboard"

    def open(self, run: RunDescription) -> TrackerRun:
        """Begin a file of events; where a run goes on, what was written after its checkpoint is passed over."""
        return TensorBoardRun(self.folder_of(run), run)


class TensorBoardRun(TrackerRun):
    """The event files of one run."""

    def __init__(self, folder: Path, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.id = str(folder)
        goes_on = TensorBoard.name in run.ids
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.since + 1, flush_secs=10)
        if not goes_on:
            rows = [f"| {key} | {value} |" for key, value in flat(run.settings).items()]
            self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))
            if run.schedule:
                self._writer.add_text("schedule", f"```\n{run.schedule}\n```")

    def write(self, rows: Sequence[Row]) -> None:
        """Add a point to the curve of each value."""
        for step, values in rows:
            for key, value in values.items():
                self._writer.add_scalar(grouped(key), value, step)

    def add_file(self, path: Path) -> None:
        """Say where the file is: event files hold none."""
        self._writer.add_text(f"files/{path.name}", f"`{path.resolve()}`")

    def close(self, *, finished: bool) -> None:
        """Write what is left."""
        self._writer.close()
