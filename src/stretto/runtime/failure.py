"""A process that fails says so once. What it refuses, all refuse; if it crashes, the others end without a word."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from stretto.errors import StrettoError
from stretto.runtime.rendezvous.signed_store import ForgedError
from stretto.runtime.wait_report import here

KEY = "failure"
GRACE = 2.0  # seconds for whoever failed to say so, after its connection has gone


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
        """Translate an error."""
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
        """An error of this process."""
        refusal = isinstance(error, StrettoError) and not isinstance(error, WorkerLostError)
        return cls(rank, type(error).__name__, f"{error}", refusal, list(getattr(error, "__notes__", ())))

    def like(self, other: "ReportedFailure") -> bool:
        """Whether it is the same failure, on any process."""
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
        """Whether some process has failed."""
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
    """What a process has told."""
    return ReportedFailure(**json.loads(bytes(told)))
