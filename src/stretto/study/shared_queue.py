"""Who makes which run of a study that many machines share.

A run is a trial in a storage of optuna's, enlisted once: whoever wants to make it must have taken it there, and whoever
has made it leaves its files there, small ones, from which the others' reports have all runs. Weights stay where they
were made. The truth of what a process has is on its own disk, as without a storage.

Whoever makes a run counts up in its trial, every `beat` seconds. A trial that somebody else has seen standing still for
`patience` seconds, by his own clock, is lost, and the run is enlisted again. Optuna's own heartbeat is for data bases
only; this works in a journal file as well, and no two clocks need to agree.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from stretto.study.process_pool import Failure, Task
from stretto.study.store import EVENTS, RUN, write_run
from stretto.study.study import Study, record_of

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

BEAT, PATIENCE, PAUSE = 10.0, 90.0, 1.0  # seconds; the last between two looks while there is nothing to take
NAME, FILES, BEATS, WHY, WHERE = "run", "files", "beats", "failed", "worker"  # what a trial says


class Roster:
    """The trials of a study. Use as a context manager: what was taken and not made is given back at its end."""

    def __init__(
        self,
        storage: "BaseStorage",
        study: Study,
        *,
        beat: float = BEAT,
        patience: float = PATIENCE,
        pause: float = PAUSE,
    ) -> None:
        self.beat, self.patience, self.pause = beat, patience, pause
        self._storage = storage
        self._id = study_of(storage, f"compare-{study.settings.model}-{study.settings.data}-{study.settings.digest}")
        self._tasks = {task.settings.id: task for task in study.tasks}
        self._mine: dict[str, int] = {}  # run -> its trial, of those that are made here
        self._seen: dict[int, tuple[int, float]] = {}  # trial -> what it counted, and since when
        self._idle_since = -pause
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._count, name="stretto-roster", daemon=True)

    def __enter__(self) -> Self:
        self._enlist(again=True)
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pulse.join()
        for run in list(self._mine):
            self._end(run, "FAIL")
        self._storage.remove_session()

    def take(self) -> Task | None:
        """A run that is to be made here now; None if there is none at the moment."""
        if time.monotonic() < self._idle_since + self.pause:
            return None
        self._give_up_lost()
        self._enlist()
        for run, trial in standing(self._trials()).items():
            if trial.state.name == "WAITING" and run in self._tasks and self._claim(run, trial):
                task = self._tasks[run]
                if record_of(task) is None:
                    return task
                self.finish(task)  # made before, when nobody heard of it
        self._idle_since = time.monotonic()
        return None

    def finish(self, task: Task) -> None:
        """Leave what a run came to, which is on the disk by now."""
        run = task.settings.id
        content = {name: (task.folder / name).read_text(encoding="utf-8") for name in (RUN, EVENTS)}
        loss = json.loads(content[RUN])["record"]["validation_loss"]
        self._end(run, "COMPLETE", {FILES: content}, None if loss is None else [loss])

    def fail(self, failure: Failure) -> None:
        """Say why a run could not be made; nobody tries it again before a command is started anew."""
        self._end(failure.task.settings.id, "FAIL", {WHY: failure.reason})

    def fetch(self) -> Iterator[Task]:
        """Write down the runs that others have made since."""
        for run, trial in standing(self._trials()).items():
            task = self._tasks.get(run)
            if task is not None and trial.state.name == "COMPLETE" and record_of(task) is None:
                write_run(task.folder, trial.user_attrs[FILES])
                yield task

    @property
    def settled(self) -> bool:
        """Whether every run was made, or could not be."""
        trials = self._trials()
        there = standing(trials)
        ended = {run for run, trial in last(trials).items() if WHY in trial.user_attrs}
        return all(run in ended if run not in there else there[run].state.is_finished() for run in self._tasks)

    def failures(self) -> Iterator[Failure]:
        """The runs that could not be made anywhere."""
        trials = self._trials()
        there = standing(trials)
        for run, trial in last(trials).items():
            if run in self._tasks and run not in there and WHY in trial.user_attrs:
                yield Failure(self._tasks[run], trial.user_attrs[WHY])

    def _trials(self) -> list["FrozenTrial"]:
        return sorted(self._storage.get_all_trials(self._id, deepcopy=False), key=lambda trial: trial.number)

    def _enlist(self, *, again: bool = False) -> None:
        """Add the runs that have no trial, or lost theirs; `again` also those that could not be made.

        Two processes may do so at once: then the later trial does not count, and is ended here.
        """
        from optuna.trial import TrialState, create_trial

        trials = self._trials()
        there, ended = standing(trials), last(trials)
        for run, task in self._tasks.items():
            if run not in there and (again or run not in ended or WHY not in ended[run].user_attrs):
                settings = task.settings
                said = {NAME: run, "method": settings.method, "lr": settings.lr, "batch_size": settings.batch_size,
                        "seed": settings.seed}  # fmt: skip
                self._storage.create_new_trial(self._id, create_trial(state=TrialState.WAITING, user_attrs=said))
        trials = self._trials()
        numbers = {trial.number for trial in standing(trials).values()}
        for trial in trials:
            if trial.state == TrialState.WAITING and trial.number not in numbers:
                self._change(trial._trial_id, "FAIL", {"twice": True})

    def _claim(self, run: str, trial: "FrozenTrial") -> bool:
        """Take a waiting trial; False if somebody else was sooner."""
        if not self._change(trial._trial_id, "RUNNING"):
            return False
        self._storage.set_trial_user_attr(trial._trial_id, WHERE, socket.gethostname())
        self._mine[run] = trial._trial_id
        return True

    def _give_up_lost(self) -> None:
        """End the trials whose workers have given no sign of life for too long."""
        now = time.monotonic()
        for trial in self._trials():
            if trial.state.name != "RUNNING" or trial._trial_id in self._mine.values():
                continue
            count = trial.user_attrs.get(BEATS, 0)
            before, since = self._seen.get(trial._trial_id, (None, now))
            if before != count:
                self._seen[trial._trial_id] = (count, now)
            elif now - since > self.patience:
                self._change(trial._trial_id, "FAIL")

    def _end(self, run: str, state: str, said: dict[str, Any] | None = None, values: list[float] | None = None) -> None:
        trial = self._mine.pop(run)
        self._change(trial, state, said, values)

    def _change(
        self, trial: int, state: str, said: dict[str, Any] | None = None, values: list[float] | None = None
    ) -> bool:
        """Say something in a trial and change its state; False where others have ended or taken it before."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        try:
            for name, value in (said or {}).items():
                self._storage.set_trial_user_attr(trial, name, value)
            return self._storage.set_trial_state_values(trial, TrialState[state], values)
        except UpdateFinishedTrialError:
            return False

    def _count(self) -> None:
        """Give signs of life, until it is over."""
        from optuna.exceptions import OptunaError

        count = 0
        while not self._over.wait(self.beat):
            count += 1
            for trial in list(self._mine.values()):
                # It has ended in between, or was given up; or the storage cannot be reached: at the next beat it may.
                with contextlib.suppress(OptunaError, OSError):
                    self._storage.set_trial_user_attr(trial, BEATS, count)


def study_of(storage: "BaseStorage", name: str) -> int:
    """The study of this name; whoever is first makes it."""
    from optuna.exceptions import DuplicatedStudyError
    from optuna.study import StudyDirection

    with contextlib.suppress(DuplicatedStudyError):
        return storage.create_new_study([StudyDirection.MINIMIZE], name)
    return storage.get_study_id_from_name(name)


def standing(trials: Iterable["FrozenTrial"]) -> dict[str, "FrozenTrial"]:
    """The trial that counts for each run: the first that did not fail. `trials` in order."""
    found: dict[str, FrozenTrial] = {}
    for trial in trials:
        if trial.state.name != "FAIL":
            found.setdefault(trial.user_attrs[NAME], trial)
    return found


def last(trials: Iterable["FrozenTrial"]) -> dict[str, "FrozenTrial"]:
    """The last trial of each run, but for those that were enlisted twice."""
    return {trial.user_attrs[NAME]: trial for trial in trials if "twice" not in trial.user_attrs}
