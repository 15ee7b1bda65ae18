"""DualPipeV (DeepSeek 2025, github.com/deepseek-ai/DualPipe): forwards and backwards in pairs, on a V of stages.

Worker w has the stages w and 2W-1-w. In the steady state it alternates a forward of one of them with a backward of the
other; a device that ran both at once would hide the messages of one behind the products of the other. Here they come
one after the other, forward first, as `torch.distributed.pipelining.ScheduleDualPipeV` lists them. Only backwards at
the ends of a turn are split in I and W. F = I = W = 1 and B = 2; marks as in zero_bubble.py.

    2:3 .. 0 1 2 aa3   bb4   cc5   dd6  ee  ff g  G
    2:2 ..0 1 2 3   aa4   bb5   cc6   dd  ee  f gF G
    1:4 .   0 1aA2 bb3   cc4   dd5  ee6.  ff  g G
    1:1 .012 3    4   aa5   bb6   cc   .dd  ee f gFG
    0:5      0aA1bB2 cc3   dd4  ee5.  ff6.  gg
    0:0 01234       5   aa6   bb   .cc   .dd  eeffgg

With F = I = W a turn takes 6M + W - 1, as ZB-V's; a worker holds 2W + 1 activations.
"""

from collections import Counter, deque
from collections.abc import Iterator

from stretto.errors import UsageError
from stretto.schedule.action import Action
from stretto.schedule.library.gpipe import at_least_one, updates
from stretto.schedule.library.zero_bubble import check_two_stages_each, down
from stretto.schedule.schedule import Schedule


def dualpipe_v(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """Two stages a worker, s and 2W-1-s, and at least 2W micro-batches; a worker holds 2W + 1 activations at most.

    Raises UsageError for counts that cannot be.
    """
    at_least_one(num_stages=num_stages, num_workers=num_workers, microbatches=microbatches)
    check_two_stages_each(num_stages, num_workers)
    if microbatches < num_stages:
        raise UsageError(
            f"microbatches={microbatches} for num_stages={num_stages}: dualpipe-v needs at least "
            f"{num_stages} micro-batches, as many as stages"
        )
    body = []
    for worker in range(num_workers):
        order = list(paired_order(worker, num_workers, microbatches))
        body.append((*order, *updates([worker, num_stages - 1 - worker], microbatches)))
    return Schedule(tuple(body), microbatches)


def paired_order(worker: int, num_workers: int, microbatches: int) -> Iterator[Action]:
    """A worker's actions of a turn, updates apart: warm-up, pairs in the steady state, cool-down."""
    low, high = worker, 2 * num_workers - 1 - worker
    above = num_workers - 1 - worker
    ending = [(high, low)[i % 2] for i in range(2 * (worker + 1))]
    half = len(ending) // 2
    phases = [
        *[("F", low)] * (2 * above),
        *[("F", low), ("F", high)] * (worker + 1),
        *[("I", high), ("W", high), ("F", high)] * above,
        *[("F", low), ("B", high), ("F", high), ("B", low)] * (microbatches - 2 * num_workers + worker + 1),
        *[("B", high), ("F", high), ("B", low)] * above,
        *[("B", stage) for stage in ending[:half]],
        *[("I", stage) for stage in ending[half:]],
        *[("W", low), ("I", low)] * above,
        *[("W", low)] * (worker + 1),
    ]  # W stands for the oldest weight gradient that is left, of either stage
    begun: Counter[tuple[str, int]] = Counter()
    left: deque[Action] = deque()
    for kind, stage in phases:
        if kind == "W":
            if left:
                yield left.popleft()
            continue
        direction = "forward" if kind == "F" else "backward"
        microbatch = begun[direction, stage]
        begun[direction, stage] += 1
        action = down(stage, microbatch) if kind == "I" else Action(kind, stage, microbatch)
        if action.kind == "I":
            left.append(action._replace(kind="W"))
        yield action
