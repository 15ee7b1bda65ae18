"""The finished runs of a study, one JSON object a line; safe with several processes, whole at any moment."""

import fcntl
import json
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path

from harness.cells import Record, Run
from stretto.system.destinations import write_whole
from stretto.system.fork_server import blocked

CLAIMS = ".claims"  # files that processes lock: one for the store, one for each run under way


class Store:
    """A file of runs by key. Nothing finished is lost, whenever a process ends: the file is replaced whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claims = path.parent / CLAIMS

    def read(self) -> dict[str, Record]:
        """All finished runs, by key, in the order in which they finished."""
        if not self.path.is_file():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return {record["key"]: record for record in map(json.loads, lines)}

    def add(self, record: Record) -> None:
        """Add a run, or replace the one with its key; an interrupt waits until it is written."""
        with blocked(signal.SIGINT, signal.SIGTERM), self._locked("store", wait=True):
            records = {**self.read(), record["key"]: record}
            lines = [json.dumps(each, allow_nan=False) for each in records.values()]
            write_whole(self.path, "\n".join(lines) + "\n")

    @contextmanager
    def claimed(self, run: Run) -> Iterator[bool]:
        """Whether this process may make the run: no other one is at it. It is free again at the block's end."""
        with self._locked(run.key, wait=False) as mine:
            yield mine and run.key not in self.read()

    def launching(self) -> AbstractContextManager[bool]:
        """Whether this process may make launches: no other one is at them."""
        return self._locked("launches", wait=False)

    @contextmanager
    def _locked(self, name: str, *, wait: bool) -> Iterator[bool]:
        self._claims.mkdir(parents=True, exist_ok=True)
        with (self._claims / sha256(name.encode()).hexdigest()[:16]).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True  # closing the file frees the lock
