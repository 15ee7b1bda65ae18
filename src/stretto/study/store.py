"""Runs as plain files: a folder that is there is finished; what is being written has another name."""

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from stretto.errors import UsageError
from stretto.report.record import Observation, Point, Record
from stretto.study.disk import locked, writing
from stretto.tracing import Recording

RUN, EVENTS, MODEL, STUDY, LOCK = "run.json", "events.jsonl", "model.safetensors", "study.json", ".lock"


class RunWriter:
    """Writes one run into `.<name>.partial` beside its folder; `finish` gives the folder its name.

    What an interrupted run leaves is cleared away, at once or by the next start. Use as a context manager.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._events: TextIO | None = None

    def __enter__(self) -> "RunWriter":
        with writing(self.folder):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._events = locked(self._partial / EVENTS, self.folder)
            self._events.truncate(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._events is not None
        with contextlib.suppress(OSError):  # a full disk has been reported by then
            self._events.close()
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def event(self, kind: str, **values: Any) -> None:
        """Append one line to the run's events."""
        assert self._events is not None
        with writing(self.folder):
            self._events.write(json.dumps({"event": kind, **values}, allow_nan=False) + "\n")
            self._events.flush()

    def traces(self, recordings: Iterable[Recording]) -> None:
        """Keep what the run's workers recorded."""
        with writing(self.folder):
            for recording in recordings:
                recording.write(self._partial)

    def finish(self, run: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Write what the run ended with, make sure it is on the disk, and give the folder its name."""
        from safetensors.torch import save

        tensors = {key: value.detach().cpu().clone() for key, value in weights.items()}
        with writing(self.folder):
            (self._partial / MODEL).write_bytes(save(tensors))
            (self._partial / RUN).write_text(json.dumps(run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            replace_into(self._partial, self.folder)


def replace_into(written: Path, folder: Path) -> None:
    """Make sure that what was written is on the disk, then give it its name."""
    for path in written.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    written.rename(folder)


def read_run(folder: Path) -> tuple[dict[str, Any], Record]:
    """A finished run: its run.json, and the record with its evaluations. Raises UsageError for a damaged one."""
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        events = [json.loads(line) for line in (folder / EVENTS).read_text(encoding="utf-8").splitlines()]
        if events[-1]["event"] != run["record"]["status"]:
            raise ValueError(f"the end of {EVENTS} is missing")
        points = tuple(Point.from_json(event) for event in events if event["event"] == "evaluation")
        observations = tuple(Observation.from_json(event) for event in events if event["event"] == "observation")
        return run, replace(Record.from_json(run["record"]), points=points, observations=observations)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder} is damaged ({type(error).__name__}: {error}): delete this folder and start the same command "
            "again; only this run is repeated"
        ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    beside.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def versions() -> dict[str, str]:
    """What a run was made with."""
    found = {name: version(name) for name in ("stretto", "torch", "numpy", "scikit-learn")}
    return {**found, "python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
