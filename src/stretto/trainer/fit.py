"""`Trainer.fit`: goes through data for some epochs or steps, evaluates, saves, resumes and stops.

`Loop` has the steps themselves, which the runs of studies make, too.
"""

import math
import os
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from torch.utils.data import DataLoader

from stretto import checkpoint
from stretto.errors import StrettoError, UsageError
from stretto.nn.seeding import derive
from stretto.options.checks import flag, function, refuse, sequence, shown, whole
from stretto.options.checks import path as check_path
from stretto.options.named import MOST
from stretto.schedule.draw import idle_share
from stretto.system.destinations import check_replaced
from stretto.system.path_names import words_in_path
from stretto.system.stop_request import StopRequest
from stretto.trackers import RunDescription, Tracker
from stretto.trackers import find as find_trackers
from stretto.trainer.evaluate import named_metrics
from stretto.trainer.feed import Batch, Feed, Needs, Rows, Stream, find_feed, is_stream, packed, unpacked
from stretto.trainer.history import EarlyStop, Entry, History, Patience
from stretto.trainer.progress import Progress, progress, say
from stretto.trainer.tracking import Tracking, TrainerLike, bubble_of, drawing_of, settings_of

Callback: TypeAlias = Callable[[Any, Entry], Any]
"""(trainer, the history's newest entry) -> True to stop, anything else to go on."""

OnStep: TypeAlias = Callable[[dict[str, Any]], Any]
Log: TypeAlias = OnStep | str | Tracker | Sequence[str | Tracker]
"""What `fit` logs to: a function of each step, or the names of experiment trackers."""

T = TypeVar("T", bound=TrainerLike)

RECENT = 50  # steps over which the speed is measured
SAME_DATA = (
    "Every process gives fit the same data, in the same order, and the same arguments: give loaders that shuffle a "
    "generator, or seed all processes alike"
)


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The arguments of `Trainer.fit` but for the data, which says what they are. Raises UsageError for wrong ones."""

    batch_size: int | None
    epochs: int | None
    steps: int | None
    evaluate_every: int | None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None
    callbacks: Iterable[Callback]
    log: Log | None
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int | None
    early_stop: int | EarlyStop | None
    quiet: bool

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise UsageError(f"fit: epochs={shown(self.epochs)} and steps={shown(self.steps)}: give one of the two")
        for name in ("batch_size", "epochs", "steps", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                whole(f"fit: {name}", getattr(self, name), 1)
                if getattr(self, name) > MOST:
                    refuse(f"fit: {name}", getattr(self, name), f"at most {MOST:,}")
        if self.evaluate_every is not None and self.steps is None:
            raise UsageError(
                f"fit: evaluate_every={self.evaluate_every} goes with steps=, and epochs={self.epochs} is given: data "
                "are then evaluated at each epoch's end"
            )
        named_metrics("fit: metrics", self.metrics)
        if callable(self.callbacks):
            refuse("fit: callbacks", self.callbacks, "a list of functions of (trainer, entry)")
        sequence("fit: callbacks", self.callbacks, "a list of functions of (trainer, entry)")
        for number, callback in enumerate(self.callbacks):
            function(f"fit: callbacks[{number}]", callback, "a function of (trainer, entry)", 2)
        if callable(self.log):
            function("fit: log", self.log, "a function of a dict", 1)
        elif self.log is not None:
            find_trackers(self.log, "fit: log", also=", or a function of a dict")
        if self.checkpoint is not None:
            check_path("fit: checkpoint", self.checkpoint)
        elif self.checkpoint_every is not None:
            raise UsageError(
                f"fit: checkpoint_every={self.checkpoint_every} without a folder: give checkpoint='runs/one', too"
            )
        flag("fit: quiet", self.quiet)

    @property
    def on_step(self) -> OnStep | None:
        return self.log if callable(self.log) else None

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        return () if self.log is None or callable(self.log) else find_trackers(self.log)


@dataclass(frozen=True)
class Position:
    """How far training is: epochs that are over, batches trained of the next one, and steps in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Interval:
    """The steps from `first` to `step` of an entry whose train loss is not known yet, and what was measured then."""

    epoch: int
    first: int
    step: int
    measured: Mapping[str, float]


@dataclass
class Speed:
    """Examples a second over the last RECENT steps, without what happens between them."""

    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    since: float = field(default_factory=time.perf_counter)

    def resume(self) -> None:
        self.since = time.perf_counter()

    def add(self, examples: int) -> None:
        now = time.perf_counter()
        self.steps.append((now - self.since, examples))
        self.since = now

    def seconds_per_step(self) -> float:
        """The mean time of a step in seconds; 0 before the first one."""
        return sum(seconds for seconds, _ in self.steps) / max(1, len(self.steps))

    @property
    def examples_per_second(self) -> float:
        seconds = sum(each for each, _ in self.steps)
        return sum(examples for _, examples in self.steps) / seconds if seconds else 0.0


class Loop(ABC, Generic[T]):
    """Trains from `_place` on until it is over, or until a process is asked to stop, where training `_saves`.

    There is a loss for each step, nan for steps before a checkpoint without losses.
    """

    _feed: Feed
    _tracking: Tracking
    _request: StopRequest | None

    def __init__(self, trainer: T, *, saves: bool, save_every: int | None = None, log: OnStep | None = None) -> None:
        self._trainer, self._backend, self._saves, self._save_every = trainer, trainer.backend, saves, save_every
        self._log, self._examples_per_second = log if self._backend.rank == 0 else None, 0.0
        self._place, self._losses = Position(), list[float]()
        self._told = 0  # steps whose loss is told
        self._unknown: dict[int, int] = {}  # steps whose loss is not known yet, by the trainer's number of each
        self._between_steps = True  # and so the place belongs to the state of the data
        self._stop = self._backend.new_request()

    @abstractmethod
    def _over(self) -> bool: ...

    @abstractmethod
    def _step(self, batch: Batch) -> None: ...  # by `_train_on` and `_tell`, and what comes after each

    @abstractmethod
    def _end_epoch(self, after: Position) -> None: ...  # the next one begins at `after`

    @abstractmethod
    def _save(self) -> None: ...  # a collective, which flushes

    @contextmanager
    def _listening(self) -> Iterator[None]:
        # To the trainer's losses, and to requests to stop.
        with StopRequest() if self._saves else nullcontext() as self._request:
            self._trainer.listeners.append(self._hear)
            try:
                yield
            finally:
                self._trainer.listeners.remove(self._hear)

    def _train(self) -> bool:
        # Whether it was stopped, and saved: all processes after the same step, some steps after one of them was asked.
        trainer, asked = self._trainer, self._request
        while not self._over():
            self._between_steps = False
            for batch in self._feed.epoch(self._place.epoch, self._place.batch):
                self._step(batch)
                if self._over():
                    return False
                stops = asked is not None and self._backend.should_stop(
                    trainer.entered, trainer.lag, asked.received, self._stop
                )
                if stops or self._is_save_due(self._place.step):
                    self._save()
                if stops:
                    return True
                self._between_steps = False
            after = replace(self._place, epoch=self._place.epoch + 1, batch=0)
            self._end_epoch(after)
            self._place, self._between_steps = after, True
        return False

    def _is_save_due(self, step: int) -> bool:
        return self._save_every is not None and step % self._save_every == 0

    def _train_on(self, batch: Batch) -> float | None:
        place = self._place
        self._unknown[self._trainer.entered] = place.step
        loss = self._trainer.step(batch.x, batch.y)
        self._place, self._between_steps = replace(place, batch=place.batch + 1, step=place.step + 1), True
        return loss

    def _tell(self, examples_per_second: float) -> None:
        self._examples_per_second = examples_per_second
        self._tracking.step(self._place.step, examples_per_second)
        self._tell_losses()

    def _hear(self, minibatch: int, loss: float) -> None:
        # Those of steps before this loop, and of steps that a callback makes, are none of its own.
        if minibatch in self._unknown:
            number = self._unknown.pop(minibatch)
            assert number == len(self._losses), f"the loss of step {number} after {len(self._losses)}"
            self._losses.append(loss)

    def _tell_losses(self) -> None:
        # A step whose telling is interrupted is told again when training goes on.
        for number in range(self._told, len(self._losses)):
            step, loss = number + 1, self._losses[number]
            self._tracking.loss(step, loss)
            if self._log is not None:
                self._log({"step": step, "loss": loss, "examples_per_second": self._examples_per_second})
            self._told = step

    def _flush(self) -> None:
        self._trainer.flush()
        self._tell_losses()


class FitLoop(Loop[TrainerLike]):
    """One call of `Trainer.fit`, on each process."""

    _line: Progress

    def __init__(self, trainer: TrainerLike, needs: Needs, train: Any, validation: Any, given: FitArguments) -> None:
        saves, every = given.checkpoint is not None, given.checkpoint_every
        super().__init__(trainer, saves=saves, save_every=every, log=given.on_step)
        self._of, self._given, self._needs = trainer.specification, given, needs
        self._began = trainer.entered
        self._train_data, self._validation_data = train, validation
        self._last = 0  # the step of the last entry
        self._sizes: list[int] = []  # examples of the steps whose train loss is in no entry yet
        self._open: deque[Interval] = deque()
        self._history = History()
        self._history.steps = self._losses
        self._tracker_ids: dict[str, str] = {}  # of the run that a checkpoint goes on with
        self._speed = Speed()
        self.interrupted: str | None = None  # that it was asked to stop, and how to go on
        self._by_callback = False  # whether a callback has stopped it
        self._first = self._backend.rank == 0
        self._told_dropped = False
        metrics = [f"validation_{name}" for name in given.metrics or {}]
        if given.metrics and validation is None:
            raise UsageError(
                f"fit: metrics {', '.join(given.metrics)} are measured on validation data: give validation="
            )
        evaluated = [] if validation is None else ["validation_loss", "validation_accuracy", *metrics]
        rule = EarlyStop.of(given.early_stop, ["train_loss", *evaluated])
        self._waiting = None if rule is None else Patience(rule)

    def run(self) -> History:
        """Train, from the checkpoint on if there is one; a collective. Afterwards look at `interrupted`."""
        self._find_feeds()
        found = self._given.checkpoint is not None and checkpoint.exists(self._given.checkpoint)
        if self._given.checkpoint is not None:
            make_room(self._given.checkpoint)
        self._description = self._describe(found) if self._saves or self._several else {}
        self._backend.compare(self._description, "goes through other data, or with other arguments,", SAME_DATA)
        if found:
            self._resume()
        self._tracking = self._track()
        self._tell_losses()
        shown_here = self._first and not self._given.quiet
        self._bubble = bubble_of(self._trainer) if shown_here else None
        line = progress("fit", self._total(), done=self._place.step, silent=not shown_here, figures=self._figures)
        with self._listening(), line as self._line:
            self._speed.resume()
            finished = False
            try:
                self._train_to_the_end()
                finished = self.interrupted is None
            finally:
                del self._line  # which refers to this loop: a Trainer that nobody uses any more is freed at once
                together = finished or self.interrupted is not None or not self._several
                self._tracking.close(finished=finished, settles=together)
        return self._history

    def _train_to_the_end(self) -> None:
        try:
            if self._last < self._place.step and self._due() and not self._history.stopped:
                self._end_interval(self._place)  # it was interrupted before that
            if not self._over():
                self._tell_dropped()
            if self._train():
                self.interrupted = self._how_to_go_on()
        except KeyboardInterrupt as error:
            if self._saves and not self._several and not (self._request and self._request.received):
                self._save_after(error)
            raise
        if self.interrupted is None:
            self._flush()
            self._complete()
            if self._request is not None and self._backend.any_process(self._request.received):
                self.interrupted = f"fit had ended, after step {self._place.step}"

    def _track(self) -> Tracking:
        trackers, since = self._given.trackers, self._told
        if not trackers:
            return Tracking(self._trainer, (), RunDescription(""), warnings.warn)
        settings = settings_of(self._trainer) | {"batch_size": self._feed.batch_size}
        method = words_in_path(self._of.method.name)
        description = RunDescription(
            name=f"fit-{method}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}",
            settings=settings | {"epochs": self._given.epochs, "steps": self._given.steps},
            schedule=drawing_of(self._trainer),
            ids=self._tracker_ids,
            since=since,
        )
        return Tracking(self._trainer, trackers, description, warnings.warn)

    # -- data -------------------------------------------------------------------------------------------------------

    def _find_feeds(self) -> None:
        given = self._given
        compare = self._compare_first if self._several else None
        seed = derive_seed(self._of.seed, self._began)
        self._feed: Feed = find_feed(
            self._train_data, "train", given.batch_size, self._needs, seed=seed, compare=compare
        )
        if given.epochs is not None and given.epochs > 1:
            self._feed.refuse_once()
        self._validation: Feed | None = None
        if self._validation_data is not None:
            evaluates = 0 in self._backend.replicas or self._of.sync.sharding is not None
            needs = Needs(self._needs.x and evaluates, self._needs.y and evaluates)
            own = is_stream(self._validation_data) or isinstance(self._validation_data, DataLoader)
            size = None if own else self._feed.batch_size
            self._validation = find_feed(
                self._validation_data,
                "validation",
                size,
                needs,
                seed=seed,
                compare=compare,
                loaders_as_they_are=isinstance(self._feed, Stream),
            )
            if given.epochs != 1:
                self._validation.refuse_once()

    @property
    def _several(self) -> bool:
        return self._backend.size > 1

    def _compare_first(self, what: str, digest: str) -> None:
        self._backend.compare({what: digest}, "goes through other data", SAME_DATA)

    def _describe(self, found: bool) -> dict[str, Any]:
        given = self._given
        return {
            "train": self._feed.extent,
            "digest of train": self._feed.digest(),
            "validation": "none" if self._validation is None else self._validation.extent,
            "digest of validation": None if self._validation is None else self._validation.digest(),
            "batch_size": self._feed.batch_size,
            "epochs": str(given.epochs),
            "steps": str(given.steps),
            "evaluate_every": str(given.evaluate_every),
            "checkpoint_every": str(given.checkpoint_every),
            "metrics": ", ".join(given.metrics or {})[:200],
            "trackers": ", ".join(map(str, given.trackers))[:200],
            "early_stop": "none" if self._waiting is None else str(self._waiting.rule)[:200],
            "checkpoint": "none" if given.checkpoint is None else "there" if found else "not there yet",
        }

    def _total(self) -> int | None:
        if self._given.steps is not None:
            return self._given.steps
        per_epoch, epochs = self._feed.per_epoch, self._given.epochs
        if per_epoch is None or epochs is None:
            return None
        return self._place.step - self._place.batch + (epochs - self._place.epoch) * per_epoch

    # -- training ---------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        ends = ((self._given.steps, self._place.step), (self._given.epochs, self._place.epoch))
        return self._history.stopped is not None or any(end is not None and done >= end for end, done in ends)

    def _step(self, batch: Batch) -> None:
        self._train_on(batch)
        self._sizes.append(batch.examples)
        self._speed.add(batch.examples)
        self._tell(self._speed.examples_per_second)
        self._line.advance()
        self._complete()
        if self._due():
            self._end_interval(self._place)

    def _end_epoch(self, after: Position) -> None:
        if not self._place.batch:
            raise self._no_batches()
        if self._given.evaluate_every is None and self._place.step > self._last:
            self._end_interval(after)
        self._tell_dropped()

    def _figures(self) -> str:
        place, losses = self._place, self._losses
        texts = [f"epoch {place.epoch + 1}", f"loss {losses[-1]:.4g}" if losses else "loss -"]
        texts.append(f"{self._speed.examples_per_second:,.0f} examples/s")
        if self._bubble is not None:
            texts.append(f"bubble {idle_share(self._bubble)}")
        if (total := self._total()) is not None:
            texts.append(f"{max(0, total - place.step) * self._speed.seconds_per_step():.0f} s left")
        return ", ".join(texts)

    def _due(self) -> bool:
        every, step = self._given.evaluate_every, self._place.step
        return step == self._given.steps or (every is not None and step % every == 0)

    def _tell_dropped(self) -> None:
        if self._feed.dropped and self._first and not self._told_dropped:
            self._told_dropped = True
            which = "a batch" if isinstance(self._feed, Stream) else "the last batch of an epoch"
            warnings.warn(
                f"{self._feed.where}: {which} has {self._feed.dropped} examples, too few for "
                f"{self._needs.examples} micro-batches and replicas together: it is left out",
                stacklevel=2,
            )

    def _no_batches(self) -> UsageError:
        if self._feed.dropped:
            return self._needs.too_few(
                self._feed.dropped,
                f"{self._feed.where} gave only batches of fewer than {self._needs.examples} examples, as the method's "
                "micro-batches and the replicas need together",
                "larger batches",
            )
        return UsageError(
            f"{self._feed.where} gave no batches in epoch {self._place.epoch + 1}: is it empty, or used up? Give an "
            "object that makes a new iterator for each epoch"
        )

    # -- entries of the history -------------------------------------------------------------------------------------

    def _end_interval(self, after: Position) -> None:
        # Evaluates, saves, and tells callbacks; `after` is the place from which to go on.
        given = self._given
        at_end = (given.steps, after.step), (given.epochs, after.epoch)
        if self._saves or any(end == done for end, done in at_end):
            self._flush()
        measured: dict[str, float] = {}
        if self._validation is not None:
            values = self._trainer.evaluate(self._validation.in_order(), given.metrics)
            measured = {f"validation_{name}": value for name, value in values.items()}
        self._refuse_unmeasured(measured)
        epoch = after.epoch + (after.batch > 0)
        self._open.append(Interval(epoch, self._last, after.step, measured))
        self._place, self._last, self._between_steps = after, after.step, True
        self._complete()
        self._speed.resume()

    def _refuse_unmeasured(self, measured: Mapping[str, float]) -> None:
        metric = "train_loss" if self._waiting is None else self._waiting.rule.metric
        if metric != "train_loss" and metric not in measured:
            raise UsageError(
                f"fit: early_stop: there is no {metric}: targets are no classes, or the output has one "
                f"column. Choose train_loss or {' or '.join(measured)}"
            )

    def _complete(self) -> None:
        # Entries whose losses are all known, which under asynchronous methods is `lag` steps after their end.
        ready = []
        while self._open and self._open[0].step <= len(self._losses):
            ready.append(self._entry(self._open.popleft()))
            self._history.entries.append(ready[-1])
            self._tracking.evaluation(ready[-1]["step"], {k: v for k, v in ready[-1].items() if k != "step"})
            if self._waiting is not None and self._waiting.should_stop(ready[-1][self._waiting.rule.metric]):
                self._history.stopped = self._patience()
        if ready and self._saves:
            self._save()
        for entry in ready:
            self._call(entry)

    def _entry(self, interval: Interval) -> Entry:
        count = interval.step - interval.first
        sizes, self._sizes = self._sizes[:count], self._sizes[count:]
        losses = self._losses[interval.first : interval.step]
        total = (
            math.fsum(map(float.__mul__, losses, map(float, sizes))) if all(map(math.isfinite, losses)) else math.nan
        )
        return {"epoch": interval.epoch, "step": interval.step, "train_loss": total / sum(sizes), **interval.measured}

    def _patience(self) -> str:
        assert self._waiting is not None
        rule, best = self._waiting.rule, self._waiting.best
        return f"{rule.metric} has not bettered {'nan' if best is None else f'{best:.6g}'} for {rule.patience} entries"

    def _call(self, entry: Entry) -> None:
        wanted = [callback for callback in self._given.callbacks if callback(self._trainer, dict(entry)) is True]
        if self._backend.any_process(bool(wanted)):
            self._by_callback = True
            self._history.stopped = f"by a callback after step {entry['step']}"
            if self._saves:
                self._save()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_after(self, error: KeyboardInterrupt) -> None:
        # An interrupt that came not as a signal, from a callback or the data.
        try:
            if not (self._between_steps or isinstance(self._feed, Rows)):
                raise UsageError("it came while a batch was read or trained")
            self._trainer.flush()
            self._write()  # and logs nothing: that may be what was interrupted
        except StrettoError as refused:
            error.add_note(f"nothing was saved: {refused}")
        else:
            error.add_note(self._how_to_go_on())

    def _how_to_go_on(self) -> str:
        place = self._place
        return (
            f"fit was stopped after step {place.step} (batch {place.batch} of epoch {place.epoch + 1}), which is saved "
            f"in {os.fspath(self._given.checkpoint or '')}: call it again with the same arguments to go on"
        )

    def _is_save_due(self, step: int) -> bool:
        return super()._is_save_due(step) and step != self._last  # else saved with the entry

    def _save(self) -> None:
        self._flush()
        self._write()

    def _write(self) -> None:
        assert self._given.checkpoint is not None
        state = {
            "began": self._began,
            "place": [self._place.epoch, self._place.batch, self._place.step],
            "last": self._last,
            "sizes": self._sizes,
            "losses": array("d", self._losses).tobytes(),
            "told": self._told,
            "entries": self._history.entries,
            "by_callback": self._by_callback,
            "data": packed(self._feed.state()),
            "trackers": self._tracking.for_checkpoint(),
            **{key: self._description[key] for key in SAME_ON_RESUME},
        }
        self._trainer.save(self._given.checkpoint, extra={"fit": state})

    def _resume(self) -> None:
        assert self._given.checkpoint is not None
        path = self._given.checkpoint
        state = checkpoint.read_manifest(path).extra.get("fit")
        if not isinstance(state, dict):
            raise UsageError(
                f"fit: checkpoint={os.fspath(path)} holds a checkpoint that fit did not write: load it with "
                "trainer.load, and name another folder for those of fit"
            )
        for key in SAME_ON_RESUME:
            if None not in (state[key], self._description[key]) and state[key] != self._description[key]:
                raise UsageError(
                    f"fit: checkpoint={os.fspath(path)} was trained with {key} {state[key]}, this is {key} "
                    f"{self._description[key]}: give the same, or name another folder"
                )
        self._trainer.load(path)
        losses = array("d")
        losses.frombytes(state["losses"])
        self._began, self._tracker_ids = state["began"], state.get("trackers", {})
        self._place, self._last = Position(*state["place"]), state["last"]
        self._sizes, self._by_callback = list(state["sizes"]), state["by_callback"]
        self._losses[:], self._history.entries = losses, state["entries"]
        self._told = state.get("told", len(losses))
        if isinstance(self._feed, Rows):
            self._feed.seed = derive_seed(self._of.seed, self._began)
        self._stop_again()
        if self._first and not self._given.quiet:
            rest = "nothing is left to do" if self._over() else f"goes on after step {self._place.step}"
            say(f"fit: {rest}, from {os.fspath(path)}")
        told = None if self._over() else self._feed.restore(unpacked(state["data"]))
        if told is not None and self._first:
            warnings.warn(told, stacklevel=2)

    def _stop_again(self) -> None:
        # A run that has stopped early does not go on; with another patience it may.
        if self._by_callback:
            self._history.stopped = f"by a callback after step {self._place.step}"
        for entry in self._history.entries if self._waiting is not None else ():
            if self._waiting is not None and self._waiting.rule.metric in entry:
                self._waiting.should_stop(entry[self._waiting.rule.metric])
        if self._waiting is not None and self._waiting.waited:
            self._history.stopped = self._patience()


SAME_ON_RESUME = ("train", "digest of train", "batch_size")


def derive_seed(seed: int, began: int = 0) -> int:
    """The seed of the order of examples: another one where a trainer goes on with a second `fit`."""
    return derive(seed, "batches", *([began] if began else []))


def make_room(path: str | os.PathLike[str]) -> None:
    """Make the folder in which a checkpoint will be saved. Raises UsageError where nothing can be written there."""
    folder = Path(os.path.realpath(path)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"fit: checkpoint={os.fspath(path)}: cannot make {folder}: {error.strerror}") from error
    check_replaced(Path(path), "checkpoint", "partial", "former")
