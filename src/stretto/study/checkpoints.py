"""The checkpoints of a run that has not ended, in `.<name>.checkpoints` beside its folder; the last two are kept.

They go when the run is finished: nothing would go on from them, and a run's folder holds its weights.
"""

import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any, Self

from stretto.checkpoint import newest, prune
from stretto.errors import UsageError
from stretto.settings.runs import TrainSettings
from stretto.study.disk_errors import writing
from stretto.study.run_progress import Progress
from stretto.study.store import checkpoints_of
from stretto.study.study import refuse_other
from stretto.trainer.trainer import Trainer

FREE = ("workers", "data_parallel", "space")  # settings that may differ when a run goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Request:
    """Whether this process has been asked to stop: Ctrl-C and SIGTERM ask, the second time they end it at once.

    What comes within a second is the same wish: a signal to all processes of a job is passed on by the launcher, too.
    """

    def __init__(self) -> None:
        self._made_at: float | None = None
        self._former: dict[int, Any] = {}

    @property
    def made(self) -> bool:
        """Whether it has."""
        return self._made_at is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: object) -> None:
        if self._made_at is None:
            self._made_at = time.monotonic()
        elif time.monotonic() > self._made_at + 1:
            raise KeyboardInterrupt


class Checkpoints:
    """Where a run of these settings keeps its checkpoints."""

    def __init__(self, settings: TrainSettings, run: Path) -> None:
        self._settings = {key: value for key, value in settings.to_json().items() if key not in FREE}
        self._run = run
        self.folder = checkpoints_of(run)
        self.every = settings.checkpoint_every

    def due(self, step: int) -> bool:
        """Whether to drain and save after this step."""
        return self.every is not None and step % self.every == 0

    def save(self, trainer: Trainer, progress: Progress) -> Path:
        """Save all that the run needs to go on; a collective."""
        path = self.folder / f"step-{progress.steps}"
        with writing(self.folder):
            trainer.save(path, extra={"settings": self._settings, "progress": progress.to_json()})
        if trainer.rank == 0:
            prune(self.folder)
        return path

    def load(self, trainer: Trainer) -> tuple[Progress, list[str]]:
        """Go on from the newest checkpoint that is whole; a collective. Also what is wrong with newer ones.

        Without one the run begins at its beginning. Raises UsageError if they are those of another run.
        """
        path, complaints = newest(self.folder)
        if path is None:
            return Progress(), complaints
        extra = trainer.load(path)
        refuse_other(self.folder, "checkpoints of a run", extra["settings"], self._settings)
        return Progress.from_json(extra["progress"]), complaints

    def last(self) -> int | None:
        """The step of the newest one that is whole, if there is any."""
        path = newest(self.folder)[0]
        return None if path is None else int(path.name.removeprefix("step-"))

    def refuse_forgotten(self) -> None:
        """Raise UsageError if there are some: starting again would lose them."""
        step = self.last()
        if step is not None:
            raise UsageError(
                f"{self.folder} holds a checkpoint of step {step} of a run to {self._run} that has not ended: give "
                "--resume to go on from it, or delete that folder to start again"
            )

    def refuse_nothing(self) -> None:
        """Raise UsageError if there is none that is whole: whoever wants to go on does not want to begin."""
        path, complaints = newest(self.folder)
        if path is None:
            why = f" that is whole ({'; '.join(complaints)})" if complaints else ""
            raise UsageError(
                f"nothing to resume: {self.folder} holds no checkpoint{why} of the run to {self._run}. Leave --resume "
                "out to begin, or name the --out of the run that was interrupted"
            )

    def clear(self) -> None:
        """Remove them all."""
        shutil.rmtree(self.folder, ignore_errors=True)
