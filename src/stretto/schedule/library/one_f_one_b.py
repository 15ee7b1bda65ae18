"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503; DAPPLE): GPipe's time with less memory.

Time runs to the right, one row a worker, F = 1, B = 2, updates take no time; digits are forwards, letters backwards:

    3 ...0aa1bb2cc3dd4ee5ff......
    2 ..01..aa2bb3cc4dd5ee.ff....
    1 .012....aa3bb4cc5dd.ee.ff..
    0 0123......aa4bb5cc.dd.ee.ff

Bubble (S-1)/(M+S-1); stage s holds the activations of min(M, S-s) micro-batches. With one more forward before the first
backward for each worker above (`ahead=1`) it holds min(M, 2(S-s)-1), and waits less for messages:

    3 ...0aa1bb2cc3dd4ee5ff......
    2 ..012.aa3bb4cc5dd.ee.ff....
    1 .01234..aa5bb.cc.dd.ee.ff..
    0 012345....aa.bb.cc.dd.ee.ff
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

from stretto.schedule.action import Action
from stretto.schedule.library.gpipe import at_least_one, backward, contiguous, forward, updates
from stretto.schedule.schedule import Schedule

T = TypeVar("T")


def one_f_one_b(num_stages: int, num_workers: int, microbatches: int, ahead: int = 0) -> Schedule:
    """As many forwards ahead as there are workers above, and `ahead` more for each; then one forward, one backward.

    Several stages on a worker run a micro-batch one after the other, forward ascending and backward descending.
    Raises UsageError for counts that cannot be.
    """
    at_least_one(microbatches=microbatches)

    def body(worker: int, stages: range) -> tuple[Action, ...]:
        ups = [forward(stages, m) for m in range(microbatches)]
        downs = [backward(stages, m) for m in range(microbatches)]
        order = alternate(ups, downs, (num_workers - 1 - worker) * (1 + ahead))
        return (*chain.from_iterable(order), *updates(stages, microbatches))

    cut = contiguous(num_stages, num_workers)
    return Schedule(tuple(body(worker, stages) for worker, stages in enumerate(cut)), microbatches)


def alternate(forwards: Sequence[T], backwards: Sequence[T], ahead: int) -> Iterator[T]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards, strict=False):
        yield from pair
    yield from backwards[len(forwards) - ahead :]
