"""What a process is doing, told to the others once it takes long: who waits for whom is then plain."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from stretto.runtime.group_sockets import bytes_received
from stretto.runtime.rendezvous.signed_store import ForgedError
from stretto.schedule import Action

PATIENCE = 30.0  # seconds until a wait is worth a word
LAST_LOOKS = 3  # of a second each, without a byte


class Doing(NamedTuple):
    """One thing that takes time: an action, or waiting for something from a worker."""

    since: float  # time.monotonic()
    what: str | Action
    worker: int | None = None  # whom it waits for; None: it works
    among: Sequence[int] = ()  # all whom it waits for, if they are several
    every: bool = False  # whether some of them may have left, as long as not all have

    def told(self, now: float) -> dict[str, Any]:
        """For the other processes."""
        return {"what": str(self.what), "worker": self.worker, "seconds": now - self.since}


@dataclass
class Status:
    """What this process does at the moment. Written by the thread that trains, read by the one that watches."""

    doing: Doing = field(default_factory=lambda: Doing(time.monotonic(), "the script"))

    def acts(self, action: Action) -> None:
        """This process runs an action from now on."""
        self.doing = Doing(time.monotonic(), action)

    def rests(self) -> None:
        """The user's script goes on."""
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
        """It begins."""
        self._status.doing = self._doing

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """It is over, unless it failed."""
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
        """End the thread at its next look."""
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
    """This process, for messages."""
    return f"pid {os.getpid()} on {socket.gethostname()}"
