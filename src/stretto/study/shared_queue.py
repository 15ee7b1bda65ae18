"""A queue of a study's runs that many machines share, in a storage of optuna's.

A run is a trial there, added once. A process takes a run by changing its trial from WAITING to RUNNING, and writes the
run's small files into the trial when it is finished, so that all machines can report all runs. Weights stay where they
were made. What a process itself has is decided by its own disk, as without a storage.

A process that makes a run increases a counter (its heartbeat) in the trial every `beat` seconds. A trial whose counter
another process has seen unchanged for `patience` seconds, by its own clock, is lost, and the run is added again.
Optuna's own heartbeat works in data bases only; this one works in a journal file, too, and needs no common clock.
"""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stretto.errors import StrettoError, UsageError
from stretto.study.run_processes import Failure
from stretto.study.store import EVENTS, RUN, changed_sources, write_run
from stretto.study.study import Study, record_of
from stretto.study.training_run import Task
from stretto.system.destinations import check_file

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

BEAT, PATIENCE = 10.0, 90.0  # seconds from one heartbeat to the next; without one until a run is lost
PAUSE = 1.0  # seconds from one look for a waiting run to the next, while there is none
NAME, FILES, BEATS, WHY, WHERE = "run", "files", "beats", "failed", "worker"  # attributes of a trial
SETTINGS = "settings"  # attribute of a study
FORMS = "journal:PATH (a file), sqlite:///PATH (a file, of one machine), postgresql://USER:PASSWORD@HOST/NAME"
TRIES = 5  # to open a data base in which another process is just making the tables
TRANSACTION_TIMEOUT = 60  # seconds that SQLite waits for another process's transaction
PACKAGES = {"psycopg2": "psycopg2-binary", "psycopg": "psycopg[binary]"}  # of drivers whose module has another name


class SharedQueue:
    """The queue of a study. Use as a context manager: runs that were taken and not made are given back at its end."""

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
        storage.set_study_user_attr(self._id, SETTINGS, study.settings.to_json())
        self._tasks = {task.settings.id: task for task in study.tasks}
        self._taken: dict[str, int] = {}  # run -> its trial, of the runs that this process makes
        self._heartbeats: dict[int, tuple[int, float]] = {}  # trial -> its counter, and when it was first seen so
        self._idle_since = -pause
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="stretto-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._add_missing(again=True)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._heart.join()
        for run in list(self._taken):
            self._end(run, "FAIL")
        self._storage.remove_session()

    def take(self) -> Task | None:
        """Take a run for this process to make; None if no run is waiting at the moment."""
        if time.monotonic() < self._idle_since + self.pause:
            return None
        self._give_up_lost()
        self._add_missing()
        for run, trial in valid_trials(self._trials()).items():
            if trial.state.name == "WAITING" and run in self._tasks and self._claim(run, trial):
                task = self._tasks[run]
                if record_of(task) is None:
                    return task
                self.finish(task)  # it was made before, and the storage does not know
        self._idle_since = time.monotonic()
        return None

    def finish(self, task: Task) -> None:
        """Write the files of a finished run, which are on this disk, into its trial."""
        run = task.settings.id
        content = {name: (task.folder / name).read_text(encoding="utf-8") for name in (RUN, EVENTS)}
        loss = json.loads(content[RUN])["record"]["validation_loss"]
        self._end(run, "COMPLETE", {FILES: content}, None if loss is None else [loss])

    def fail(self, failure: Failure) -> None:
        """Write into a trial why its run could not be made; it is tried again when a command is started again."""
        self._end(failure.task.settings.id, "FAIL", {WHY: failure.reason})

    def fetch(self) -> Iterator[Task]:
        """Copy runs that other machines have finished since the last call to this disk, and yield them."""
        for run, trial in valid_trials(self._trials()).items():
            task = self._tasks.get(run)
            if task is not None and trial.state.name == "COMPLETE" and record_of(task) is None:
                write_run(task.folder, trial.user_attrs[FILES])
                yield task

    @property
    def settled(self) -> bool:
        """Whether every run is finished or has failed."""
        trials = self._trials()
        valid = valid_trials(trials)
        failed = {run for run, trial in last_trials(trials).items() if WHY in trial.user_attrs}
        return all(run in failed if run not in valid else valid[run].state.is_finished() for run in self._tasks)

    def failures(self) -> Iterator[Failure]:
        """The runs that could not be made on any machine."""
        trials = self._trials()
        valid = valid_trials(trials)
        for run, trial in last_trials(trials).items():
            if run in self._tasks and run not in valid and WHY in trial.user_attrs:
                yield Failure(self._tasks[run], trial.user_attrs[WHY])

    def _trials(self) -> list["FrozenTrial"]:
        return sorted(self._storage.get_all_trials(self._id, deepcopy=False), key=lambda trial: trial.number)

    def _add_missing(self, *, again: bool = False) -> None:
        """Add a trial for each run that has none or has lost it; with `again` also for runs that failed.

        Two processes may add the same run: then the later trial is ended here.
        """
        from optuna.trial import TrialState, create_trial

        trials = self._trials()
        valid, last = valid_trials(trials), last_trials(trials)
        for run, task in self._tasks.items():
            if run not in valid and (again or run not in last or WHY not in last[run].user_attrs):
                settings = task.settings
                attributes = {
                    NAME: run,
                    "method": settings.method,
                    "lr": settings.lr,
                    "batch_size": settings.batch_size,
                    "seed": settings.seed,
                }
                self._storage.create_new_trial(self._id, create_trial(state=TrialState.WAITING, user_attrs=attributes))
        trials = self._trials()
        numbers = {trial.number for trial in valid_trials(trials).values()}
        for trial in trials:
            if trial.state == TrialState.WAITING and trial.number not in numbers:
                self._change(trial._trial_id, "FAIL", {"twice": True})

    def _claim(self, run: str, trial: "FrozenTrial") -> bool:
        """Take a waiting trial; False if another process has taken it."""
        if not self._change(trial._trial_id, "RUNNING"):
            return False
        self._storage.set_trial_user_attr(trial._trial_id, WHERE, socket.gethostname())
        self._taken[run] = trial._trial_id
        return True

    def _give_up_lost(self) -> None:
        """End the trials that have had no heartbeat for too long."""
        now = time.monotonic()
        for trial in self._trials():
            if trial.state.name != "RUNNING" or trial._trial_id in self._taken.values():
                continue
            count = trial.user_attrs.get(BEATS, 0)
            before, since = self._heartbeats.get(trial._trial_id, (None, now))
            if before != count:
                self._heartbeats[trial._trial_id] = (count, now)
            elif now - since > self.patience:
                self._change(trial._trial_id, "FAIL")

    def _end(
        self, run: str, state: str, attributes: dict[str, Any] | None = None, values: list[float] | None = None
    ) -> None:
        trial = self._taken.pop(run)
        self._change(trial, state, attributes, values)

    def _change(
        self, trial: int, state: str, attributes: dict[str, Any] | None = None, values: list[float] | None = None
    ) -> bool:
        """Write attributes into a trial and change its state; False if another process has taken or ended it."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        try:
            for name, value in (attributes or {}).items():
                self._storage.set_trial_user_attr(trial, name, value)
            return self._storage.set_trial_state_values(trial, TrialState[state], values)
        except UpdateFinishedTrialError:
            return False

    def _beat(self) -> None:
        """Increase the counter of every taken trial every `beat` seconds until the queue is closed."""
        from optuna.exceptions import OptunaError

        count = 0
        while not self._closed.wait(self.beat):
            count += 1
            for trial in list(self._taken.values()):
                # The trial may have ended meanwhile, or the storage may be out of reach until the next beat.
                with contextlib.suppress(OptunaError, OSError):
                    self._storage.set_trial_user_attr(trial, BEATS, count)


def study_of(storage: "BaseStorage", name: str) -> int:
    """The id of the optuna study of this name, which is made if it is not there."""
    from optuna.exceptions import DuplicatedStudyError
    from optuna.study import StudyDirection

    with contextlib.suppress(DuplicatedStudyError):
        return storage.create_new_study([StudyDirection.MINIMIZE], name)
    return storage.get_study_id_from_name(name)


def refuse_other_sources(storage: "BaseStorage", study: Study) -> None:
    """Raise UsageError if the storage has this study unfinished, with other versions of the user's functions or data.

    It would be another study there, and nobody would share it. One that is finished may have been edited since.
    """
    here: dict[str, Any] = json.loads(json.dumps(study.settings.to_json()))
    for other in storage.get_all_studies():
        there = storage.get_study_user_attrs(other._study_id).get(SETTINGS, {})
        if there == here or {**there, "sources": None} != {**here, "sources": None}:
            continue
        if all(trial.state.is_finished() for trial in storage.get_all_trials(other._study_id, deepcopy=False)):
            continue
        raise UsageError(
            "the storage has this study, unfinished, with other versions of "
            f"{changed_sources(there, here)}: give all machines the same files and data, or name another --storage for "
            "a study of its own"
        )


def valid_trials(trials: Iterable["FrozenTrial"]) -> dict[str, "FrozenTrial"]:
    """{run: its first trial that did not fail}; `trials` are in order of their numbers."""
    valid: dict[str, FrozenTrial] = {}
    for trial in trials:
        if trial.state.name != "FAIL":
            valid.setdefault(trial.user_attrs[NAME], trial)
    return valid


def last_trials(trials: Iterable["FrozenTrial"]) -> dict[str, "FrozenTrial"]:
    """{run: its last trial}, without trials that were ended because their run had been added twice."""
    return {trial.user_attrs[NAME]: trial for trial in trials if "twice" not in trial.user_attrs}


def open_storage(url: str) -> "BaseStorage":
    """Open the storage at a URL (see FORMS), or make it. Raises UsageError if it cannot be reached."""
    scheme, _, rest = url.partition(":")
    if scheme not in ("journal", "sqlite") and not scheme.startswith("postgresql"):
        raise UsageError(f"storage={without_password(url)!r}: give {FORMS}")
    try:
        import optuna
    except ImportError as error:
        raise UsageError(f"storage={without_password(url)!r} needs optuna: pip install 'stretto[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if scheme != "journal":
        return open_data_base(url)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not rest or not Path(rest).parent.is_dir():
        raise UsageError(f"storage={without_password(url)!r}: name a file in a folder that is there: journal:PATH")
    check_file(Path(rest))
    return JournalStorage(JournalFileBackend(rest))


def open_data_base(url: str) -> "BaseStorage":
    """Open a data base; several processes may do so while it is made."""
    from optuna.exceptions import OptunaError
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.pool import NullPool

    sqlite = url.startswith("sqlite")
    options: dict[str, Any] = {"pool_pre_ping": True}
    if sqlite:  # without a pool, connections are closed after each transaction
        options = {"connect_args": {"timeout": TRANSACTION_TIMEOUT}, "poolclass": NullPool}
    for left in reversed(range(TRIES)):
        try:
            storage = RDBStorage(url, engine_kwargs=options)
            break
        except ImportError as error:
            module = str(getattr(first_cause(error), "name", None))
            raise UsageError(
                f"storage={without_password(url)!r} needs a driver that is not there, {module}: pip install "
                f"'{PACKAGES.get(module, module)}'"
            ) from error
        except (OptunaError, SQLAlchemyError) as error:
            if left == 0:
                raise UsageError(
                    f"storage={without_password(url)!r} cannot be opened ({one_line(error)}): give {FORMS}"
                ) from error
            time.sleep(0.2)
    if sqlite:
        lock_at_first_read(storage.engine)
    return storage


def lock_at_first_read(engine: Any) -> None:
    """Make SQLite's transactions begin with their first read.

    Python's driver begins them with the first write: two processes that read "waiting" would both take a trial.
    """
    from sqlalchemy import event

    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn optuna's errors, from a storage that cannot be reached any more, into StrettoError."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except OptunaError as error:
        raise StrettoError(
            f"storage={without_password(url)!r} cannot be reached any more ({one_line(error)}): finished runs are "
            "kept, the same command makes the others"
        ) from error


def without_password(text: str) -> str:
    """A URL without its password, for pages and messages; any other text as it is."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:...@", text)


def one_line(error: BaseException) -> str:
    """An error in one line."""
    first = first_cause(error)
    return next(iter(str(first).splitlines()), type(first).__name__)


def first_cause(error: BaseException) -> BaseException:
    """The first error in the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
