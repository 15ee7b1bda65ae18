"""What a message of the runtime costs while its two ends compute: the sender, the way, the receiver.

Two processes take turns, as stages of a pipeline do: each works, sends, goes on with something else, and receives. A
period is then twice the work, a send, the way and a receive: no clocks are compared. Then both send to each other, work
until the messages have long been there, and take them, many times over: what that takes longer than the same work alone
keeps them busy, be it in the calls or because what moves messages takes their cores.

Work that keeps a process busy as training does, for what is measured beside it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from stretto.runtime.channel import ChannelEnd, Inbox, Outbox
from stretto.runtime.failure import Status

WORK, BESIDE = 2e-3, 1.2e-3  # seconds of work, and of what goes on beside a message
LONG, WAYS = 10e-3, 4.0  # work until a message has long been there: seconds, or times its way
ROUNDS, BLOCKS, BLOCK = 12, 5, 0.25  # messages of a block, fewer where it would take more seconds
FEW, SLOW = 2, 1.0  # blocks where one takes so many seconds
TAG = 0x57A1F


class Passage(NamedTuple):
    """Seconds of a message: what it keeps its sender busy for, what is left of its way, and its receiver."""

    bytes: int
    send: float
    travel: float
    receive: float


class Ends:
    """This process's two ends, and something to compute."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        line = ChannelEnd(group, 1 - group.rank(), TAG, "measured message", Status())
        self._box, self._out = Inbox(line, torch.device("cpu")), Outbox(line, depth=3)
        self._value = torch.zeros(1)
        self._matrix = torch.randn(192, 192)
        self._first = group.rank() == 0

    def begin(self, num_bytes: int) -> None:
        """Messages have so many bytes from here on; the first one says so."""
        self._value = torch.zeros(max(1, num_bytes // 4))
        self.turn()

    def work(self, seconds: float) -> float:
        """Compute for about so long; how long it really was."""
        begin = now = time.perf_counter()
        while now - begin < seconds:
            _ = self._matrix @ self._matrix
            now = time.perf_counter()
        return now - begin

    def turn(self) -> tuple[float, float]:
        """Work, send, compute a little, receive: seconds of work and of sending."""
        if not self._first:
            self._box.receive()
        worked = self.work(WORK)
        sent = seconds(lambda: self._out.send(self._value))
        self.work(BESIDE)
        if self._first:
            self._box.receive()
        return worked, sent

    def products(self, number: int) -> None:
        """So much work, however long it takes."""
        for _ in range(number):
            _ = self._matrix @ self._matrix

    def exchange(self, number: int) -> tuple[float, float]:
        """Send, work, receive what the other one has sent: seconds of sending and of receiving.

        The second one sends in the middle of its work: two that send at the same moment disturb each other.
        """
        before = 0 if self._first else number // 2
        self.products(before)
        sent = seconds(lambda: self._out.send(self._value))
        self.products(number - before)
        return sent, seconds(self._box.receive)

    def settle(self) -> None:
        """Wait until all has been taken."""
        self._out.settle()


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_passages(group: dist.ProcessGroup, sizes: Sequence[int]) -> list[Passage]:
    """Messages of so many bytes between two processes."""
    ends = Ends(group)
    return [measure_passage(group, ends, size) for size in sizes]


def measure_passage(group: dist.ProcessGroup, ends: Ends, num_bytes: int) -> Passage:
    """The message between two processes, the same on both: medians over blocks, means over both."""
    ends.begin(num_bytes)
    way = ways(group, ends)
    work = max(LONG, WAYS * way)
    number = max(1, int(work / agreed(group, seconds(lambda: ends.products(20)) / 20)))
    rounds = max(2, min(ROUNDS, int(BLOCK / work)))
    rows = [block(group, ends, number, rounds) for _ in range(FEW if 2 * rounds * work > SLOW else BLOCKS)]
    ends.settle()
    busy, sent, received = (statistics.median(column) for column in zip(*rows, strict=True))
    stolen = max(0.0, busy - sent - received) / 2
    total = sent + max(way, received)
    return Passage(num_bytes, sent + stolen, max(0.0, total - sent - received - 2 * stolen), received + stolen)


def block(group: dist.ProcessGroup, ends: Ends, number: int, rounds: int) -> tuple[float, float, float]:
    """Seconds by which a message sent and one received make a round longer, of which sending and receiving."""
    dist.barrier(group=group)
    alone = seconds(lambda: ends.products(number * rounds)) / rounds
    dist.barrier(group=group)
    begin = time.perf_counter()
    calls = [ends.exchange(number) for _ in range(rounds)]
    taken = (time.perf_counter() - begin) / rounds
    sent, received = (agreed(group, statistics.median(column)) for column in zip(*calls, strict=True))
    return agreed(group, taken) - reduced(group, alone, dist.ReduceOp.MAX), sent, received


def ways(group: dist.ProcessGroup, ends: Ends) -> float:
    """Seconds from the end of a send to the end of its receive, by turns; the same on both."""
    found, rounds = [], ROUNDS
    for _ in range(BLOCKS):
        dist.barrier(group=group)
        begin = time.perf_counter()
        work, send = (statistics.fmean(column) for column in zip(*(ends.turn() for _ in range(rounds)), strict=True))
        own = (time.perf_counter() - begin) / rounds
        period = reduced(group, own, dist.ReduceOp.MAX)  # the second one does not wait for its last message's arrival
        found.append(period / 2 - agreed(group, work + send))
        rounds = max(2, min(ROUNDS, int(BLOCK / period)))
    return max(0.0, statistics.median(found))


def agreed(group: dist.ProcessGroup, value: float) -> float:
    """The mean over the group's processes."""
    return reduced(group, value, dist.ReduceOp.SUM) / group.size()


def reduced(group: dist.ProcessGroup, value: float, by: Any) -> float:
    """What an all-reduce makes of it."""
    both = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(both, by, group=group)
    return float(both)


WARM = 10


class SampleWork:
    """Forwards and backwards, which use memory and caches as training does: products alone are too regular."""

    def __init__(self) -> None:
        self._layers = nn.Sequential(nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192), nn.LayerNorm(192))
        self._x = torch.randn(64, 192)
        self(WARM)

    def __call__(self, number: int) -> None:
        """Work so many times."""
        for _ in range(number):
            self._layers.zero_grad()
            self._layers(self._x).sum().backward()

    def number_in(self, wanted: float, group: dist.ProcessGroup, *, trials: int) -> int:
        """How often it runs in so many seconds, at least once; the same number on all processes, which try together."""
        return max(1, round(wanted / agreed(group, seconds(partial(self, trials)) / trials)))
