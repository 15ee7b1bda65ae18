"""Pipelines that never drain, with as few micro-batches under way as keep every worker busy: asynchronous 1F1B.

Time runs to the right, one row a worker, F = 1, B = 2, updates take no time; digits are forwards, letters backwards:

    3 ...0aa1bb2cc3dd4ee5ff......
    2 ..01..aa2bb3cc4dd5ee.ff....
    1 .012....aa3bb4cc5dd.ee.ff..
    0 0123......aa4bb5cc.dd.ee.ff

It looks like 1F1B, but here the picture has no end: every minibatch enters as soon as there is room, and no worker
idles once the pipeline is full. Stage s holds S-s activations. PipeDream (Narayanan et al. 2019, arXiv 1806.03377)
updates a stage after each of its backwards, which makes its gradients S-1-s updates old; PipeDream-2BW (Narayanan et
al. 2021, arXiv 2006.09503) and PACI (arXiv 2606.07881) after several. Which weights a pass sees is
not the schedule's business.

Pipelined Backpropagation's clock (Petrowski et al. 1993; Kosson et al. 2021, arXiv 2003.11666).

At tick t stage s runs the forward of micro-batch t-s, then the backward of t-(2(S-1)-s), then its update. Time runs to
the right, one row a worker, F = 1, B = 2, updates take no time; digits are forwards, letters backwards:

    3 ...0aa1bb2cc3dd4ee5ff......
    2 ..012.aa3bb4cc5dd.ee.ff....
    1 .01234..aa5bb.cc.dd.ee.ff..
    0 012345....aa.bb.cc.dd.ee.ff

No worker waits for another after the fill: messages may take as long as a forward and a backward. The price is that
stage s holds 2(S-1-s)+1 activations and its gradients are 2(S-1-s) updates old.
"""

from collections.abc import Callable, Iterator

from stretto.errors import UsageError
from stretto.schedule.action import Action
from stretto.schedule.library.gpipe import at_least_one, contiguous
from stretto.schedule.schedule import Schedule


def pipedream(num_stages: int, num_workers: int) -> Schedule:
    """Asynchronous 1F1B: F(0) B(-D) U(-D) on every stage, D = S-1-s. Raises UsageError for counts that cannot be."""
    return endless(num_stages, num_workers, lambda stage: num_stages - 1 - stage)


def pipedream_2bw(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """The same stream, `microbatches` a turn; a stage updates after every that many of its backwards.

    At least one micro-batch per stage, so that no more than one update falls between a forward and its backward: two
    versions of the weights then give every gradient the same delay of 1. Raises UsageError for counts that cannot be.
    """
    at_least_one(num_stages=num_stages, microbatches=microbatches)
    if microbatches < num_stages:
        raise UsageError(
            f"microbatches={microbatches} for num_stages={num_stages}: two versions of the weights are "
            f"not enough; use at least {num_stages} micro-batches, or paci"
        )
    return endless(num_stages, num_workers, lambda stage: num_stages - 1 - stage, microbatches)


def paci(num_stages: int, num_workers: int, every: int) -> Schedule:
    """The same stream, `every` micro-batches a turn; no gradient is more than ceil((S-1) / every) updates old.

    Raises UsageError for counts that cannot be.
    """
    at_least_one(every=every)
    return endless(num_stages, num_workers, lambda stage: num_stages - 1 - stage, every)


def endless(num_stages: int, num_workers: int, behind: Callable[[int], int], per_update: int = 1) -> Schedule:
    """One forward and one backward in turn, stage s's backward `behind(s)` micro-batches behind its forward.

    A worker with several stages runs their forwards ascending, as each feeds the next, and then their backwards
    ascending too: the lowest goes first because the worker below waits for its gradient, while the stage above it made
    what it needs in an earlier round.
    """

    def body(stages: range) -> Iterator[Action]:
        for m in range(per_update):
            for stage in stages:
                yield Action("F", stage, m)
            for stage in stages:
                finished = m - behind(stage)
                yield Action("B", stage, finished)
                if (finished + 1) % per_update == 0:
                    yield Action("U", stage, finished)

    return Schedule(tuple(tuple(body(stages)) for stages in contiguous(num_stages, num_workers)), per_update)


def pipelined_backprop(num_stages: int, num_workers: int, microbatches: int = 1) -> Schedule:
    """F(0) B(-D) U(-D) on every stage, D = 2(S-1-s); an update after every `microbatches` of its backwards.

    Raises UsageError for counts that cannot be.
    """
    at_least_one(num_stages=num_stages, microbatches=microbatches)
    return endless(num_stages, num_workers, lambda stage: 2 * (num_stages - 1 - stage), microbatches)
