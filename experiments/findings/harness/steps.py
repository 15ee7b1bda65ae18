"""Within a process of a launch: how long a step takes."""

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

WARM = 2  # steps before the clock starts, beside those that fill a pipeline
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
    return {"seconds a step": _timed(step, steps) / steps, "steps": float(steps)}


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
