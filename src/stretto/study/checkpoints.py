"""The checkpoints of a run that has not ended, in `.<name>.checkpoints` beside its folder; the last two are kept.

A finished run has none: its folder holds its weights.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.checkpoint import newest, prune, read_manifest
from stretto.errors import UsageError
from stretto.options.kinds import check_values, naming
from stretto.settings.runs import TrainSettings
from stretto.study.disk_errors import writing
from stretto.study.run_progress import Progress
from stretto.study.store import RUN, checkpoints_of, read_run, refuse_other
from stretto.trainer.trainer import Trainer

FREE = ("workers", "data_parallel", "space")  # settings that may differ when a run goes on


class Checkpoints:
    """The checkpoints of a run with these settings. `run` is the folder of the run; theirs is beside it."""

    def __init__(self, settings: TrainSettings, run: Path) -> None:
        self._settings = {key: value for key, value in settings.to_json().items() if key not in FREE}
        self._run = run
        self.folder = checkpoints_of(run)
        self.every = settings.checkpoint_every

    def due(self, step: int) -> bool:
        """Whether to drain and save after this step."""
        return self.every is not None and step % self.every == 0

    def save(self, trainer: Trainer, step: int, progress: Mapping[str, Any]) -> Path:
        """Save the trainer, and `progress` as JSON, after a step; a collective. Returns the checkpoint's folder."""
        path = self.folder / f"step-{step}"
        with writing(self.folder):
            trainer.save(path, extra={"settings": self._settings, "progress": progress})
        if trainer.rank == 0:
            prune(self.folder)
        return path

    def load(self, trainer: Trainer) -> tuple[Progress | None, list[str]]:
        """Load the newest checkpoint that is whole into the trainer; a collective.

        Returns the progress saved with it, None without a checkpoint, and sentences on newer ones that are damaged.
        Raises UsageError for a checkpoint of a run with other settings.
        """
        path, complaints = self._newest()
        if path is None:
            return None, complaints
        extra = trainer.load(path)
        with naming(f"{path}"):
            return Progress.from_json(extra["progress"]), complaints

    def _newest(self) -> tuple[Path | None, list[str]]:
        path, complaints = newest(self.folder)
        if path is not None:
            extra = read_manifest(path).extra
            with naming(f"{path}"):
                check_values("extra", extra, {"settings": dict[str, Any], "progress": dict[str, Any]})
                settings = extra["settings"]
            refuse_other(self.folder, "checkpoints of a run", settings, self._settings)
        return path, complaints

    def last(self) -> int | None:
        """The step of the newest checkpoint that is whole; None without one."""
        path = newest(self.folder)[0]
        return None if path is None else step_of(path)

    def method_begun(self) -> str | None:
        """The method of the run, finished or not, as its folder or its newest whole checkpoint has it; None of none."""
        if (self._run / RUN).is_file():
            settings = read_run(self._run)[0]["settings"]
        else:
            path = newest(self.folder)[0]
            settings = {} if path is None else read_manifest(path).extra.get("settings", {})
        method = settings.get("method") if isinstance(settings, dict) else None
        return method if isinstance(method, str) else None

    def refuse_to_overwrite(self) -> None:
        """Raise UsageError if there is a checkpoint: starting the run again would lose it."""
        step = self.last()
        if step is not None:
            raise UsageError(
                f"{self.folder} holds a checkpoint of step {step} of a run to {self._run} that has not ended: give "
                "--resume to go on from it, or delete that folder to start again"
            )

    def find(self, *, required: bool) -> tuple[int, str]:
        """The step of the newest checkpoint that is whole, 0 without one, and a sentence on what is there.

        Raises UsageError for one of a run with other settings; if it is `required`, also where there is none.
        """
        path, complaints = self._newest()
        if path is not None:
            return step_of(path), f"{self._run}: goes on from the checkpoint of step {step_of(path)}"
        whole = f" that is whole ({'; '.join(complaints)})" if complaints else ""
        none = f"{self.folder} holds no checkpoint{whole}"
        if required:
            raise UsageError(
                f"nothing to resume: {none} of the run to {self._run}. Leave --resume out to begin, give --auto-resume "
                "to begin where there is nothing, or name the --out of the run that was interrupted"
            )
        return 0, f"{self._run}: begins, for {none}"

    def clear(self) -> None:
        """Remove all checkpoints of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))
