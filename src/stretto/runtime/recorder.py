"""Records what a worker does, and what it waits for, on rank 0's clock."""

import socket
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import torch

from stretto.runtime.channel import Inbox, Outbox
from stretto.runtime.serialize import as_tensor, as_text
from stretto.schedule import Action
from stretto.stage.interpreter import Interpreter, count
from stretto.tracing import Recording

ROUNDS = 8  # of asking what time it is elsewhere


class WorkerRecorder:
    """What a worker calls after each action; `finish` waits until the device has done what it was told."""

    def __init__(self, worker: Interpreter, recording: Recording, finish: Callable[[], object] | None) -> None:
        self._worker, self._recording, self._finish = worker, recording, finish

    def __call__(self, action: Action, operands: Mapping[str, Any], start: int, end: int) -> None:
        """`action` has run."""
        if self._finish is not None:
            self._finish()
            end = perf_counter_ns()
        self._recording.span("compute", action, start, end)
        count(self._recording, self._worker, action, operands, end)


def offset_to_first(out: Outbox, box: Inbox) -> int:
    """What has to be added to this process's clock, in nanoseconds, to get that of rank 0, which runs `tell_time`.

    Processes of one machine have one clock. For others the shortest of several round trips is halved.
    """
    out.send(as_tensor(socket.gethostname().encode()))
    if not int(box.receive().value):
        return 0
    trips = []
    for _ in range(ROUNDS):
        before = perf_counter_ns()
        out.send(None)
        there = int(box.receive().value)
        after = perf_counter_ns()
        trips.append((after - before, there - (before + after) // 2))
    return min(trips)[1]


def tell_time(out: Outbox, box: Inbox) -> None:
    """Rank 0's part of `offset_to_first`, for one other process."""
    other = as_text(box.receive().value).decode() != socket.gethostname()
    out.send(torch.tensor(int(other)))
    for _ in range(ROUNDS * other):
        box.receive()
        out.send(torch.tensor(perf_counter_ns()))
