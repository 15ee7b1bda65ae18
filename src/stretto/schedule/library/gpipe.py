"""GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, all backwards, one update.

Time runs to the right, one row a worker, F = 1, B = 2, updates take no time; digits are forwards, letters backwards
(a belongs to micro-batch 0):

    3 ...0123aabbccdd......
    2 ..0123...aabbccdd....
    1 .0123......aabbccdd..
    0 0123.........aabbccdd

Bubble (S-1)/(M+S-1); every stage holds the activations of all M micro-batches.
"""

from collections.abc import Iterator, Sequence

from stretto.errors import UsageError
from stretto.schedule.action import Action
from stretto.schedule.library import backprop_and_local
from stretto.schedule.schedule import Schedule


def gpipe(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """All forwards of a minibatch, then all backwards, then the updates.

    Several stages on a worker run a micro-batch one after the other, forward ascending and backward descending.
    Raises UsageError for counts that cannot be.
    """
    at_least_one(microbatches=microbatches)

    def body(stages: range) -> Iterator[Action]:
        for m in range(microbatches):
            yield from forward(stages, m)
        for m in range(microbatches):
            yield from backward(stages, m)
        yield from updates(stages, microbatches)

    return Schedule(tuple(tuple(body(stages)) for stages in contiguous(num_stages, num_workers)), microbatches)


def forward(stages: range, microbatch: int) -> list[Action]:
    """One micro-batch up through a worker's stages."""
    return [Action("F", stage, microbatch) for stage in stages]


def backward(stages: range, microbatch: int) -> list[Action]:
    """One micro-batch down through a worker's stages."""
    return [Action("B", stage, microbatch) for stage in reversed(stages)]


def updates(stages: Sequence[int], microbatches: int) -> list[Action]:
    """The updates that end a minibatch, after all actions that another worker waits for."""
    return [Action("U", stage, microbatches - 1) for stage in reversed(stages)]


def contiguous(num_stages: int, num_workers: int) -> list[range]:
    """The stages of each worker, contiguous. Raises UsageError where a worker would have none."""
    at_least_one(num_stages=num_stages, num_workers=num_workers)
    if num_workers > num_stages:
        raise UsageError(
            f"num_workers={num_workers} for num_stages={num_stages}: a worker would have no stage; "
            f"use at most {num_stages} workers, or split the model into {num_workers} stages"
        )
    return backprop_and_local.assign(num_stages, num_workers)


def at_least_one(**counts: int) -> None:
    """Raise UsageError for a count that is not a whole number of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"{name}={count!r}: a whole number of at least 1")
