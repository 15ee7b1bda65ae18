"""Backprop and the local methods: a list for those whose backward is one sweep, for overlapping, for DNI.

Time runs to the right, one worker a stage, unit costs (F = I = W = 1, B = 2; updates take no time):

    backprop        greedy             chunked         overlapping        overlapping(delay=1)
    2 ..FBB....     3 ...FBBFBBFBB     3 ...FBB...FBB  2 ..FIW.FIW.FIW    2 ..FIFIWFIWW
    1 .F...BB..     2 ..FBBFBBFBB.     2 ..F...BBF...  1 .FI.WFI.WFI.W    1 .FIFIWFIWW.
    0 F......BB     1 .FBBFBBFBB..     1 .FBB...FBB..  0 FI.WFI.WFI.W.    0 FIFIWFIWW..
                    0 FBBFBBFBB...     0 F...BBF...BB
"""

from collections.abc import Iterator

from stretto.errors import ScheduleError
from stretto.schedule.action import Action
from stretto.schedule.even_split import bounds
from stretto.schedule.schedule import Schedule


def assign(num_stages: int, num_workers: int) -> list[range]:
    """The stages of each worker, cut as torch.tensor_split cuts: the first workers hold one more where it is uneven."""
    if not 1 <= num_workers <= num_stages:
        raise ScheduleError(
            f"{num_workers} workers for {num_stages} stages: between 1 and {num_stages} workers can work"
        )
    return [range(*bounds(num_stages, worker, num_workers)) for worker in range(num_workers)]


def one_sweep(num_stages: int, num_workers: int, chunks: int = 1) -> Schedule:
    """Every backward is one sweep. One chunk is backprop, as many chunks as stages is greedy.

    Where a worker holds stages of several chunks it runs all forwards first: the chunk that goes on at the next
    worker gets its gradient back while the others run their backward.
    """
    chunk_of = {stage: chunk for chunk, stages in enumerate(assign(num_stages, chunks)) for stage in stages}

    def body(stages: range) -> Iterator[Action]:
        for stage in stages:
            yield Action("F", stage, 0)
        for stage in sorted(stages, key=lambda stage: (chunk_of[stage], -stage)):
            yield Action("B", stage, 0)
            yield Action("U", stage, 0)

    return Schedule(tuple(tuple(body(stages)) for stages in assign(num_stages, num_workers)))


def split_backward(num_stages: int, num_workers: int, delay: int = 0, microbatches: int = 1) -> Schedule:
    """Overlapping, a reach of one: first the input gradient, then, with that of the stage above, the weight gradient.

    delay=0: F(n) I(n) W(n) U(n), a stage waits one hop for the gradient from above. delay=1: F(n) I(n) W(n-1) U(n-1),
    which fills the wait, and every gradient is one update old. A single stage has nothing to wait for: delay 0. With
    several micro-batches each W but the last comes after the next F and I: a turn waits once, and nothing is old.
    """
    delay = delay if num_stages > 1 else 0

    def body(stages: range) -> Iterator[Action]:
        for number in range(microbatches):
            for stage in stages:
                yield Action("F", stage, number)
                yield Action("I", stage, number)
            for stage in stages if number else ():
                yield Action("W", stage, number - 1)
        for stage in stages:
            yield Action("W", stage, microbatches - 1 - delay)
            yield Action("U", stage, microbatches - 1 - delay)

    return Schedule(tuple(tuple(body(stages)) for stages in assign(num_stages, num_workers)), microbatches)


def predicted_gradients(num_stages: int, num_workers: int, delay: int = 1) -> Schedule:
    """Synthetic gradients: F(n) L(n-delay) B(n) U(n), where B takes a predicted gradient and waits for nobody.

    L learns from the gradient that the stage above has sent for an earlier micro-batch; with a delay of 1 that has
    arrived when stages and links are alike, as here with L = 1. The last stage has the loss itself, and no L:

        2 ..FBBFBB.FBB.
        1 .FBBFLBBFLBBL
        0 FBBFLBBFLBB.L

    L(n-1) before F(n) would be the same arithmetic and would wait, as would L(n) after U(n).
    """

    def body(stages: range) -> Iterator[Action]:
        for stage in stages:
            yield Action("F", stage, 0)
        for stage in stages:
            if stage < num_stages - 1:
                yield Action("L", stage, -delay)
        for stage in stages:
            yield Action("B", stage, 0)
            yield Action("U", stage, 0)

    return Schedule(tuple(tuple(body(stages)) for stages in assign(num_stages, num_workers)))
