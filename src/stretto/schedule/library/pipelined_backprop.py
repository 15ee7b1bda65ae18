"""Pipelined Backpropagation's clock (Petrowski et al. 1993; Kosson et al. 2021, arXiv 2003.11666).

At tick t stage s runs the forward of micro-batch t-s, then the backward of t-(2(S-1)-s), then its update. Time runs to
the right, one row a worker, F = 1, B = 2, updates take no time; digits are forwards, letters backwards:

    3 ...0aa1bb2cc3dd4ee5ff......
    2 ..012.aa3bb4cc5dd.ee.ff....
    1 .01234..aa5bb.cc.dd.ee.ff..
    0 012345....aa.bb.cc.dd.ee.ff

No worker waits for another after the fill: messages may take as long as a forward and a backward. The price is that
stage s holds 2(S-1-s)+1 activations and its gradients are 2(S-1-s) updates old.
"""

from stretto.schedule.library.gpipe import at_least_one
from stretto.schedule.library.pipedream import endless
from stretto.schedule.schedule import Schedule


def pipelined_backprop(num_stages: int, num_workers: int, microbatches: int = 1) -> Schedule:
    """F(0) B(-D) U(-D) on every stage, D = 2(S-1-s); an update after every `microbatches` of its backwards.

    Raises UsageError for counts that cannot be.
    """
    at_least_one(num_stages=num_stages, microbatches=microbatches)
    return endless(num_stages, num_workers, lambda stage: 2 * (num_stages - 1 - stage), microbatches)
