"""Schedules for workers with several chunks of the model: stage s lives on worker s % W, each has v = S/W of them.

Time runs to the right, F = 1, B = 2, updates take no time; digits are forwards, letters backwards. One row a stage:
"1:3" is stage 3 on worker 1, and blank is the time in which worker 1 is at another stage.

    interleaved 1F1B                    looped breadth-first
    1:3 .  0aa1bb      2cc3dd    ..     1:3 .    0123ddccbbaa        ..
    1:1 .01      2aa3bb      ccdd..     1:1 .0123            ddccbbaa..
    0:2   01 .aa bb2  3  .cc.dd         0:2     0123...ddccbbaa
    0:0 01  2.  3   aa bb.  .  ccdd     0:0 0123    ...        ddccbbaa

Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473) makes the bubble v times shorter than 1F1B's and holds
W (1 + (W-1)/(Wv)) micro-batches' activations; it sends v times as often. Looped breadth-first (Lamy-Poirier 2022,
arXiv 2211.05953) is as fast and holds them all, but takes each stage up once, which spares sharded weights.
"""

from stretto.errors import UsageError
from stretto.schedule.action import Action
from stretto.schedule.library.gpipe import at_least_one, contiguous
from stretto.schedule.library.one_f_one_b import alternate, one_f_one_b
from stretto.schedule.schedule import Schedule


def interleaved(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B: micro-batches go through in rounds of about one per worker, chunk by chunk.

    With one chunk per worker this is 1F1B. As torch does, rounds may be longer than there are workers, but all must be
    equally long. Raises UsageError for counts that cannot be.
    """
    chunks = loops(num_stages, num_workers)
    at_least_one(microbatches=microbatches)
    if len(chunks) == 1:
        return one_f_one_b(num_stages, num_workers, microbatches)
    rounds = equal_rounds(num_workers, microbatches)

    def body(worker: int) -> tuple[Action, ...]:
        ups = [Action("F", first + worker, m) for many in rounds for first in chunks for m in many]
        downs = [Action("B", first + worker, m) for many in rounds for first in reversed(chunks) for m in many]
        ahead = (len(chunks) - 1) * len(rounds[0]) + 2 * (num_workers - 1 - worker)
        return (*alternate(ups, downs, ahead), *ends(chunks, worker, microbatches))

    return Schedule(tuple(body(worker) for worker in range(num_workers)), microbatches)


def looped_bfs(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """Looped breadth-first: all micro-batches through one chunk, then through the next; back in the opposite order.

    Every worker holds the activations of all micro-batches, and gathers or reduces a chunk's weights once.
    Raises UsageError for counts that cannot be.
    """
    chunks = loops(num_stages, num_workers)
    at_least_one(microbatches=microbatches)

    def body(worker: int) -> tuple[Action, ...]:
        ups = [Action("F", first + worker, m) for first in chunks for m in range(microbatches)]
        downs = [Action("B", stage, m) for _, stage, m in reversed(ups)]
        return (*ups, *downs, *ends(chunks, worker, microbatches))

    return Schedule(tuple(body(worker) for worker in range(num_workers)), microbatches)


def loops(num_stages: int, num_workers: int) -> range:
    """The first stage of each round of the model over all workers: 0, W, 2W, ..."""
    contiguous(num_stages, num_workers)
    if num_stages % num_workers:
        fewer = num_stages - num_stages % num_workers
        raise UsageError(
            f"num_stages={num_stages} on num_workers={num_workers}: every worker must have as many "
            f"stages; use {fewer} or {fewer + num_workers} stages"
        )
    return range(0, num_stages, num_workers)


def equal_rounds(num_workers: int, microbatches: int) -> list[range]:
    """Cut the micro-batches in equally long rounds, of at least one per worker if there are enough."""

    def fits(count: int) -> bool:
        return count % max(1, count // num_workers) == 0

    if not fits(microbatches):
        fewer = next(count for count in range(microbatches - 1, 0, -1) if fits(count))
        more = next(count for count in range(microbatches + 1, 2 * microbatches) if fits(count))
        raise UsageError(
            f"microbatches={microbatches} on num_workers={num_workers}: {microbatches // num_workers} "
            f"rounds cannot be equally long; use {fewer} or {more} micro-batches"
        )
    size = microbatches // max(1, microbatches // num_workers)
    return [range(first, first + size) for first in range(0, microbatches, size)]


def ends(chunks: range, worker: int, microbatches: int) -> list[Action]:
    """The updates of a worker's stages, in the order in which their last backwards end."""
    return [Action("U", first + worker, microbatches - 1) for first in reversed(chunks)]
