"""Messages between two processes that both may send at any time: a head that says how long the rest is, and the rest.

head   kind, stage, number, staleness, length of the layout, size in bytes
rest   the layout's whole numbers, the value's bytes (`serialize.py`)
"""

import threading
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.runtime.failure import reaching
from stretto.runtime.serialize import aligned, layout_of, pack, size_of, unpack

HEAD = 6  # whole numbers
TAG = 0x57A1E  # no collective and no channel has it
FOREVER = timedelta(days=1000)  # a listener waits for as long as a script takes between two steps


class Message(NamedTuple):
    """What is said, of which stage; `number` and `staleness` are a ticket's."""

    kind: str
    stage: int = 0
    number: int = 0
    staleness: int = 0
    value: Any = None


class Wire:
    """This process's end. `peer` is the other's rank in the group, `worker` its rank in the job.

    Any thread may send; one listens. What was sent is kept until the protocol says that it has been taken: gloo tells
    only those who wait for it.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, worker: int) -> None:
        self._group, self._peer, self.worker = group, peer, worker
        self._under_way: deque[tuple[str, Any, Tensor]] = deque()
        self._lock = threading.Lock()
        self.sent = 0  # bytes

    def send(self, message: Message) -> None:
        """Copy the value, and go on."""
        layout = layout_of(message.value)
        numbers = torch.tensor(layout, dtype=torch.int64).view(torch.uint8)
        start, size = aligned(len(numbers)), size_of(layout)
        rest = torch.empty(start + size, dtype=torch.uint8)
        rest[: len(numbers)] = numbers
        pack(message.value, rest[start:])
        kind, stage, number, staleness, _ = message
        head = torch.tensor([ord(kind), stage, number, staleness, len(layout), len(rest)])
        with self._lock, reaching(self.worker):
            for buffer in (head, rest):
                work = dist.isend(buffer, group=self._group, group_dst=self._peer, tag=TAG)
                self._under_way.append((kind, work, buffer))
            self.sent += head.nbytes + rest.nbytes

    def taken(self, kinds: str) -> None:
        """The other end has taken the last message of one of these kinds, and so everything before it."""
        with self._lock, reaching(self.worker):
            last = max((place for place, (kind, *_) in enumerate(self._under_way) if kind in kinds), default=-1)
            for _ in range(last + 1):
                self._under_way.popleft()[1].wait()

    def receive(self) -> Message:
        """The next message; waits for it. Raises PeerLostError once the other process has gone."""
        kind, stage, number, staleness, length, size = self._read(torch.empty(HEAD, dtype=torch.int64)).tolist()
        rest = self._read(torch.empty(size, dtype=torch.uint8))
        layout = tuple(rest[: 8 * length].view(torch.int64).tolist())
        return Message(chr(kind), stage, number, staleness, unpack(layout, rest[aligned(8 * length) :]))

    def _read(self, buffer: Tensor) -> Tensor:
        with reaching(self.worker):
            work = dist.irecv(buffer, group=self._group, group_src=self._peer, tag=TAG)
            assert work is not None, "this process is in the group"
            work.wait(FOREVER)
        return buffer
