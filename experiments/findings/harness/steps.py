"""Within a process of a launch: how long a step takes."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

WARM = 2  # steps before the clock starts, beside those that fill a pipeline
SENT = 8  # column of /proc/net/dev: bytes that were sent
LASTING, LEAST, MOST = 6.0, 5, 60  # seconds that the timed steps are to take; the fewest and the most of them


def seconds_a_step(
    step: Callable[[], object], *, fill: int = 0, multiple: int = 1, steps: int | None = None
) -> dict[str, float]:
    """Seconds a step in this process, and how many were timed: the same number in all processes of a launch.

    `fill` steps fill a pipeline, and the timed ones are a multiple of `multiple`, which begins at a multiple.
    """
    for _ in range(math.ceil((WARM + fill) / multiple) * multiple):
        step()
    if steps is None:
        trial = slowest(_timed(step, multiple)) / multiple
        steps = min(max(math.ceil(LASTING / trial), LEAST), MOST)
    steps = math.ceil(steps / multiple) * multiple
    before = sent_bytes()
    seconds = _timed(step, steps)
    return {"seconds a step": seconds / steps, "steps": float(steps), "bytes a step": (sent_bytes() - before) / steps}


def sent_bytes() -> int:
    """What this process's host has sent so far, the kernel's headers included; nothing of the loopback's."""
    rows = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    counts = {name.strip(): figures.split() for name, _, figures in (row.partition(":") for row in rows)}
    return sum(int(figures[SENT]) for name, figures in counts.items() if name != "lo")


def together() -> None:
    """Wait for all processes of the launch, without spinning."""
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """The longest of all processes."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def _timed(step: Callable[[], object], steps: int) -> float:
    together()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - begin
