"""Weights & Biases: one run there for one run here, however many processes train."""

import html
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stretto.options.checks import one_of
from stretto.system.destinations import check_folder
from stretto.trackers.tracker import Row, RunDescription, Tracker, TrackerRun, grouped

MODES = ("online", "offline", "disabled")


@dataclass(frozen=True, kw_only=True)
class WandB(Tracker):
    """A project, as wandb.init takes it; `mode` is "online", "offline", or None for what WANDB_MODE says.

    What belongs to no network lies in `folder`.
    """

    name: ClassVar[str] = "wandb"
    package: ClassVar[str | None] = "wandb"
    project: str = "stretto"
    entity: str | None = None
    mode: str | None = None
    folder: str | os.PathLike[str] = "."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is not None:
            one_of("wandb: mode", self.mode, MODES)

    def require(self, where: str) -> None:
        """Also raise UsageError if nothing can be written in its folder."""
        super().require(where)
        check_folder(Path(self.folder), "wandb(folder=...)")

    def open(self, run: RunDescription) -> TrackerRun:
        """Begin a run, in the group of its study; one that goes on has the id that it had."""
        return WandBRun(self, run)


class WandBRun(TrackerRun):
    """One run of Weights & Biases."""

    def __init__(self, options: WandB, run: RunDescription) -> None:
        import wandb

        self._wandb: Any = wandb
        self.id = run.ids.get(options.name, uuid.uuid4().hex[:12])
        begin: Any = wandb.init
        self._run = begin(
            project=options.project, entity=options.entity, name=run.name, group=run.group, id=self.id, resume="allow",
            mode=options.mode, dir=options.folder, config=dict(run.settings),
            settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # losses of asynchronous methods come late
        if run.schedule and options.name not in run.ids:
            self._run.log({"schedule": wandb.Html(f"<pre>{html.escape(run.schedule)}</pre>")})

    def write(self, rows: Sequence[Row]) -> None:
        """Log each row under its own step."""
        for step, values in rows:
            self._run.log({grouped(key): value for key, value in values.items()} | {"step": step})

    def add_file(self, path: Path) -> None:
        """Keep it as an artifact; a page is shown in the run, too."""
        artifact = self._wandb.Artifact(f"{self.id}-{path.stem}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)
        if path.suffix == ".html":
            self._run.log({path.stem: self._wandb.Html(path.read_text(encoding="utf-8"))})

    def close(self, *, finished: bool) -> None:
        """End the run; one that did not finish is marked as failed."""
        self._run.finish(exit_code=0 if finished else 1)
