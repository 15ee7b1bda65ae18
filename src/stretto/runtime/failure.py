"""A process that fails says so once; the others learn of it and end without a word of their own."""

import time
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store

from stretto.errors import StrettoError
from stretto.runtime.signed import ForgedError
from stretto.runtime.status import here

KEY = "failure"
GRACE = 3.0  # seconds for whoever failed to say so, after its connection has gone


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


class Failures:
    """What has gone wrong in the job, as far as this process knows. The first failure is the one that counts."""

    def __init__(self, store: Store | None, rank: int) -> None:
        self._store = store
        self._rank = rank

    def translate(self, error: BaseException, doing: str, chain: Callable[[], str]) -> BaseException:
        """What this process is to raise for an error; `doing` is what it did, `chain` tells who waits for whom."""
        if not isinstance(error, PeerLostError):
            text = f"{type(error).__name__}: {error}"
            if not self._publish(text) and self._published(0) == text:
                return SystemExit(1)  # all processes have made the same mistake, and another one says it
            error.add_note(f"on worker {self._rank}, {here()}")
            return error
        lost = self._roll_call(error.among) if len(error.among) > 1 else [error.worker]
        who = " or ".join(map(str, lost))
        if self._published(GRACE) is not None or not self._publish(f"worker {who} is lost"):
            return SystemExit(1)  # somebody else has said why
        if error.timed_out:
            return WorkerLostError(f"{chain()}. Nobody waits longer: Trainer(timeout=seconds) sets how long")
        return WorkerLostError(
            f"worker {who} is gone: it ended without a word (killed, or out of memory?) while worker "
            f"{self._rank} {doing}"
        )

    def tell(self, error: BaseException) -> None:
        """Something has gone wrong in a thread: whoever waits for this process learns of it before its error is raised.

        That a peer is gone, its own thread or another process will find out.
        """
        if not isinstance(error, PeerLostError):
            self._publish(f"{type(error).__name__}: {error}")

    def known(self) -> bool:
        """Whether some process has failed."""
        return self._published(0) is not None

    def _roll_call(self, among: Sequence[int]) -> list[int]:
        # Those of several that do not answer; all who miss somebody come here.
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

    def _publish(self, text: str) -> bool:
        # Whether this failure is the first.
        if self._store is None:
            return True
        try:
            mine = f"{self._rank} {text}"
            return bytes(self._store.compare_set(KEY, "", mine)).decode() == mine
        except (RuntimeError, ForgedError):  # the store has gone with the process that held it, or a stranger wrote
            return True

    def _published(self, seconds: float) -> str | None:
        # The first failure, once there is one.
        if self._store is None:
            return None
        until = time.monotonic() + seconds
        try:
            while not self._store.check([KEY]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.05)
            return bytes(self._store.get(KEY)).decode().partition(" ")[2]
        except RuntimeError:
            return None
