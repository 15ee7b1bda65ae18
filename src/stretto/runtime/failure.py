"""What a process tells the others while it waits, and when it fails.

What a process is doing is told once it takes long: who waits for whom is then plain. A process that fails says so once.
What it refuses, all refuse; if it crashes, the others end without a word.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from stretto.errors import StrettoError
from stretto.runtime.group_sockets import bytes_received
from stretto.runtime.rendezvous.signed_store import ForgedError
from stretto.schedule import Action

PATIENCE = 30.0  # seconds until a wait is worth a word
LAST_LOOKS = 3  # of a second each, without a byte
KEY = "failure"
GRACE = 2.0  # seconds for whoever failed to say so, after its connection has gone


class Doing(NamedTuple):
    """One thing that takes time: an action, or waiting for something from a worker."""

    since: float  # time.monotonic()
    what: str | Action
    worker: int | None = None  # whom it waits for; None: it works
    among: Sequence[int] = ()  # all whom it waits for, if they are several
    every: bool = False  # whether some of them may have left, as long as not all have

    def told(self, now: float) -> dict[str, Any]:
        return {"what": str(self.what), "worker": self.worker, "seconds": now - self.since}


@dataclass
class Status:
    """What this process does at the moment. Written by the thread that trains, read by the one that watches."""

    doing: Doing = field(default_factory=lambda: Doing(time.monotonic(), "the script"))

    def acts(self, action: Action) -> None:
        self.doing = Doing(time.monotonic(), action)

    def rests(self) -> None:
        self.doing = Doing(time.monotonic(), "the script")

    def told(self) -> str:
        """In words that follow this worker's name."""
        return describe(self.doing.told(time.monotonic()))

    def waiting(self, what: str, worker: int, among: Sequence[int] = (), *, every: bool = False) -> "Waiting":
        """While it lasts, this process waits for a worker, or all of several; if that fails, it is what it was doing.

        Nothing comes any more from one that has left.
        """
        return Waiting(self, Doing(time.monotonic(), what, worker, among or (worker,), every))


class Waiting:
    """A wait, in a with statement."""

    def __init__(self, status: Status, doing: Doing) -> None:
        self._status, self._doing, self._before = status, doing, status.doing

    def __enter__(self) -> None:
        self._status.doing = self._doing

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._status.doing = self._before


class WaitReporter(threading.Thread):
    """Looks at the status of this process now and then; says who waits for whom when a wait takes long.

    One process says it for all of them; it says so again when the wait has become three times as long. Where the other
    one has come to the end of its script, and nothing arrives any more, `on_left` is called with its rank, once.
    """

    def __init__(
        self, status: Status, store: Store, rank: int, on_left: Callable[[int], object], patience: float = PATIENCE
    ) -> None:
        super().__init__(name="stretto-wait-report", daemon=True)
        self.patience = patience
        self._status, self._store, self._rank = status, store, rank
        self._on_left = on_left
        self._ended = threading.Event()
        self.say: Callable[[str], object] = lambda text: print(f"stretto: {text}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Until `end` is called, or the store has gone: then the job has ended."""
        try:
            with contextlib.suppress(DistError):
                self._watch()
        except ForgedError as error:
            self.say(f"{error}")

    def _watch(self) -> None:
        next_word = self.patience
        seen: Doing | None = None
        quiet = 0  # looks since something has arrived, while it waits for one that has left
        arrived = 0
        while not self._ended.wait(min(self.patience / 6, 1)):
            doing = self._status.doing
            now = time.monotonic()
            if doing is not seen:
                seen, next_word, quiet = doing, self.patience, 0
            elif left := self._left(doing):
                before, arrived = arrived, bytes_received()
                quiet = quiet + 1 if arrived == before else 0
                if quiet == LAST_LOOKS:
                    self._on_left(left[0])
            if now - doing.since > self.patience / 3:
                self._store.set(self._key(self._rank), json.dumps({**doing.told(now), "at": time.time()}))
            if doing.worker is not None and now - doing.since > next_word:
                next_word *= 3
                self._speak(doing, now)

    def _left(self, doing: Doing) -> list[int]:
        # Those it waits for who have come to the end of their scripts, if nothing can come any more.
        left = [worker for worker in doing.among if self._store.check([left_key(worker)])]
        return [] if doing.every and len(left) < len(doing.among) else left

    def end(self) -> None:
        self._ended.set()

    def chain(self) -> str:
        """Who waits for whom, beginning with this process."""
        worker = self._rank
        known: dict[int, Mapping[str, Any]] = {worker: self._status.doing.told(time.monotonic())}
        words = f"worker {worker}"
        while True:
            words += " " + describe(known[worker])
            following = known[worker]["worker"]
            if following is None:
                return words
            if following in known:
                return f"{words}: a circle"
            words += ", which"
            worker = following
            known[worker] = self._read(worker)

    def _speak(self, doing: Doing, now: float) -> None:
        # The first to notice speaks, for as long as its patience lasts.
        turn = int(time.time() / self.patience)
        if self._store.add(f"spoken/{turn}", 1) == 1:
            self.say(self.chain())

    def _read(self, worker: int) -> Mapping[str, Any]:
        key = self._key(worker)
        if not self._store.check([key]):
            return {"what": None, "worker": None, "seconds": 0.0}
        told: dict[str, Any] = json.loads(self._store.get(key))
        age = time.time() - told["at"]
        if age > self.patience:  # it has gone on since, or it says nothing any more
            return {"what": None, "worker": None, "seconds": age}
        return {**told, "seconds": told["seconds"] + age}

    def _key(self, rank: int) -> str:
        return f"status/{rank}"


def left_key(rank: int) -> str:
    """Where a process says that it has come to its end."""
    return f"left/{rank}"


def describe(told: Mapping[str, Any]) -> str:
    """What a worker does, in words that follow its name."""
    if told["what"] is None:
        return "has said nothing of itself: it goes on, or it is stopped or gone"
    seconds = f"{told['seconds']:.0f} s"
    if told["worker"] is None:
        return f"is in {told['what']} since {seconds}"
    return f"waits since {seconds} for {told['what']} from worker {told['worker']}"


def here() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


class PeerLostError(StrettoError):
    """The connection to another worker is gone, or it did not answer in time."""

    def __init__(self, worker: int, cause: BaseException, among: Sequence[int] = ()) -> None:
        super().__init__(f"no answer from worker {worker}: {cause}")
        self.worker = worker
        self.among = tuple(among)  # where several work together: one of these it is
        self.timed_out = "timed out" in str(cause).lower()


class WorkerLostError(StrettoError):
    """A worker has ended without saying why, or does not answer: training cannot go on."""


class reaching:  # noqa: N801 (a word of a with statement, as contextlib.suppress)
    """While it lasts, an error of torch.distributed means that a worker cannot be reached.

    A class, because every message comes by here: a generator takes several times as long.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerLostError(self._worker, error) from error


@dataclass(frozen=True)
class ReportedFailure:
    """A failure, as the first process that has failed tells it to the others."""

    rank: int
    kind: str  # the name of the error's class
    text: str
    refusal: bool = False  # whether the error was raised on purpose: a script may catch it and go on
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "ReportedFailure":
        refusal = isinstance(error, StrettoError) and not isinstance(error, WorkerLostError)
        return cls(rank, type(error).__name__, f"{error}", refusal, list(getattr(error, "__notes__", ())))

    def like(self, other: "ReportedFailure") -> bool:
        return (self.kind, self.text) == (other.kind, other.text)

    def again(self) -> StrettoError:
        """The error that was refused with, for another process to raise."""
        error = {each.__name__: each for each in kinds(StrettoError)}.get(self.kind, StrettoError)(self.text)
        for note in self.notes:
            error.add_note(note)
        error.said_by = self.rank
        return error


def kinds(kind: type[StrettoError]) -> Iterator[type[StrettoError]]:
    """A class of errors that are made of a text, and all that inherit from it."""
    if not issubclass(kind, PeerLostError):
        yield kind
        for each in kind.__subclasses__():
            yield from kinds(each)


class Failures:
    """What has gone wrong in the job, as far as this process knows. The first failure is the one that counts."""

    def __init__(self, store: Store | None, rank: int) -> None:
        self._store = store
        self._rank = rank
        self.left: int | None = None  # a worker that has left while this process waits for it

    def translate(self, error: BaseException, doing: str, chain: Callable[[], str]) -> BaseException:
        """What this process is to raise for an error; `doing` is what it did, `chain` tells who waits for whom."""
        if not isinstance(error, PeerLostError):
            error.add_note(f"on worker {self._rank}, {here()}")
            mine = ReportedFailure.of(error, self._rank)
            first = self._publish(mine)
            if first.rank == self._rank:
                return error
            if first.refusal and (mine.refusal or of_connections(error)):
                return first.again()
            return SystemExit(1) if first.like(mine) else error  # all have made the same mistake, and another says it
        if self.left is not None:
            lost = [self.left]
        else:
            lost = self._roll_call(error.among) if len(error.among) > 1 else [error.worker]
        who = " or ".join(map(str, lost))
        mine = ReportedFailure(self._rank, "lost", f"worker {who} is lost")
        told = self._published(GRACE if self.left is None else 0) or self._publish(mine)
        if told != mine:  # somebody else has said why
            return told.again() if told.refusal else SystemExit(1)
        if self.left is not None:
            return WorkerLostError(
                f"worker {who} has come to the end of its script while worker {self._rank} {doing}: it has taken fewer "
                "steps, or something has ended it (sys.exit, an error that was caught)"
            )
        if error.timed_out:
            return WorkerLostError(f"{chain()}. --timeout, or Trainer(timeout=), sets how long a worker waits")
        return WorkerLostError(
            f"worker {who} is gone: it ended without a word (killed, or out of memory?) while worker "
            f"{self._rank} {doing}"
        )

    def tell(self, error: BaseException) -> None:
        """Something has gone wrong in a thread: whoever waits for this process learns of it before its error is raised.

        That a peer is gone, its own thread or another process will find out.
        """
        if not isinstance(error, PeerLostError):
            self._publish(ReportedFailure.of(error, self._rank))

    def known(self) -> bool:
        return self._published(0) is not None

    def _roll_call(self, among: Sequence[int]) -> list[int]:
        # Those of several that do not answer; all who miss somebody come here.
        missing: list[int] = []
        if self._store is None:
            return list(among)
        try:
            self._store.set(f"{KEY}/here/{self._rank}", "")
            until = time.monotonic() + GRACE
            while time.monotonic() < until and self._published(0) is None:
                missing = [rank for rank in among if not self._store.check([f"{KEY}/here/{rank}"])]
                if len(missing) == 1:
                    return missing
                time.sleep(0.05)
        except RuntimeError:
            return list(among)
        return missing or list(among)

    def _publish(self, mine: ReportedFailure) -> ReportedFailure:
        # The failure that was the first: this one, or another that was published before.
        if self._store is None:
            return mine
        try:
            return read(self._store.compare_set(KEY, "", json.dumps(asdict(mine))))
        except (RuntimeError, ForgedError):  # the store has gone with the process that held it, or a stranger wrote
            return mine

    def _published(self, seconds: float) -> ReportedFailure | None:
        # The first failure, once there is one.
        if self._store is None:
            return None
        until = time.monotonic() + seconds
        try:
            while not self._store.check([KEY]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.05)
            return read(self._store.get(KEY))
        except RuntimeError:
            return None


def of_connections(error: BaseException) -> bool:
    """Whether an error comes of a connection to another process, in a collective of the user's own."""
    return isinstance(error, RuntimeError) and (isinstance(error, DistError) or "gloo" in f"{error}")


def read(told: bytes) -> ReportedFailure:
    return ReportedFailure(**json.loads(bytes(told)))
