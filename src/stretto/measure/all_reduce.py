"""Measures all-reduces on this machine: each algorithm over sizes, and what a message, a byte and an addition take."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.algorithms import ALGORITHMS, NESTED
from stretto.collectives.calibration import Calibration, SizeTimes
from stretto.collectives.formulas import Link
from stretto.collectives.library.ring import nodes_of
from stretto.collectives.reduce import all_reduce
from stretto.measure.nonnegative_fit import line

TORCH = "torch"  # torch's own, beside ours
ITEM = 4  # bytes: float32
FEWEST, REPEATS, BUDGET = 3, 30, 0.4  # calls of each algorithm and size; seconds that they may take together

OnMeasured = Callable[[], object]  # called whenever one algorithm or message has been measured at one size


def measure(
    group: dist.ProcessGroup, sizes: Sequence[int], *, per_node: int | None = None, tell: OnMeasured | None = None
) -> Calibration:
    """Measure on all processes of a group; the same result on all of them. `sizes` are in bytes, of float32.

    A time is that of the slowest process, the median over calls; algorithms take turns.
    """
    assert group.size() > 1, "one process has nobody to send to"
    tell, per_node = tell or ignore, nodes_of(group.size(), per_node)
    messages = [(size, ping_pong(group, size)) for size in with_progress(sizes, tell)]
    additions = [(size, adding(group, size)) for size in with_progress(sizes, tell)]
    latency, per_byte = line(messages).rates
    _, reduction = line(additions).rates
    rows = tuple(all_reduces(group, size, per_node, tell) for size in sizes)
    link = Link(latency=latency, seconds_per_byte=per_byte, reduction_seconds_per_byte=reduction)
    return Calibration(workers=group.size(), per_node=per_node, link=link, measured=rows)


def ignore() -> None:
    """Take no notice of progress: the default for `tell`."""


def steps_of(sizes: Sequence[int]) -> int:
    """How often `measure` calls `tell`."""
    return len(sizes) * (len(ALGORITHMS) + 3)


def with_progress(sizes: Sequence[int], tell: OnMeasured) -> Iterator[int]:
    """The sizes one by one; `tell` is called after each."""
    for size in sizes:
        yield size
        tell()


def ping_pong(group: dist.ProcessGroup, num_bytes: int) -> float:
    """Seconds of a message between the first two processes of a group, one way, while neither does anything else."""
    rank, tensor = group.rank(), torch.zeros(max(1, num_bytes // ITEM))

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank == sender:
                group.send([tensor], 1 - rank, 0).wait()
            elif rank < 2:
                group.recv([tensor], sender, 0).wait()

    return timed(group, {"": there_and_back}, ignore)[""] / 2


def adding(group: dist.ProcessGroup, num_bytes: int) -> float:
    """Seconds to add so many bytes to others, as all processes do at the same time."""
    tensor, addend = torch.zeros(max(1, num_bytes // ITEM)), torch.zeros(max(1, num_bytes // ITEM))
    return timed(group, {"": lambda: tensor.add_(addend)}, ignore)[""]


def all_reduces(group: dist.ProcessGroup, num_bytes: int, per_node: int, tell: OnMeasured) -> SizeTimes:
    """Seconds of every algorithm, and of torch's, for a tensor of so many bytes."""
    tensor = torch.zeros(num_bytes // ITEM)

    def ours(name: str) -> Callable[[], Tensor]:
        options: dict[str, Any] = {"per_node": per_node} if name == NESTED else {}
        return lambda: all_reduce(tensor, group, name, **options)

    calls: dict[str, Callable[[], object]] = {TORCH: lambda: dist.all_reduce(tensor, group=group)}
    calls |= {name: ours(name) for name in ALGORITHMS}
    return SizeTimes(num_bytes, timed(group, calls, tell))


def timed(group: dist.ProcessGroup, calls: dict[str, Callable[[], object]], tell: OnMeasured) -> dict[str, float]:
    """The median over repeated calls of the time that the slowest process takes, seconds.

    Calls take turns, in another order each time; the first of each, which lays out its plan, is not counted.
    """
    names = list(calls)
    first = slowest(group, [[once(group, calls[name]) for name in names]])
    repeats = max(FEWEST, min(REPEATS, int(BUDGET * len(names) / max(sum(first[0]), 1e-9))))
    turns = []
    for turn in range(repeats):
        taken = {name: once(group, calls[name]) for name in shifted(names, turn * 5)}
        turns.append([taken[name] for name in names])
    for _ in names:
        tell()
    columns = zip(*slowest(group, turns), strict=True)
    return {name: statistics.median(column) for name, column in zip(names, columns, strict=True)}


def shifted(names: Sequence[str], by: int) -> list[str]:
    """The names in their order, but beginning with another one."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def once(group: dist.ProcessGroup, call: Callable[[], object]) -> float:
    """Seconds of one call, which all processes begin together."""
    dist.barrier(group=group)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def slowest(group: dist.ProcessGroup, times: list[list[float]]) -> list[list[float]]:
    """The longest time that any process measured, for each call."""
    together = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    longest: list[list[float]] = together.tolist()
    return longest
