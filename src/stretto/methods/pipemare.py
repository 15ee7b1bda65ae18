"""PipeMare (Yang et al. 2021, arXiv 1910.05124): smaller steps where gradients are old, and a backward that looks back.

T1 divides the learning rate by max(tau, 1)^p, p falling from 1 to 0 over K updates; T2 gives the backward an estimate
of the weights its forward saw, tau updates back. For both tau is the mean delay of the micro-batches of an update, a
fraction: with N of them tau = tau_f - tau_b = 2(S-1-s)/N on the PB clock, where tau_b = 0. (The paper counts one slot
more, (2(S-s)-1)/N.)
"""

from functools import partial

from stretto.methods.cure import Correction, Cure
from stretto.methods.definition import Method
from stretto.methods.pipelined_backprop import PB_CLOCK
from stretto.methods.synchronous_pipelines import check_count, check_flag
from stretto.schedule.library.pipedream import pipelined_backprop


def pipemare(*, reschedule: int | None = None, correct: bool = True, microbatches: int = 1) -> Method:
    """T1 over `reschedule` updates (None: no T1), T2 if `correct`, and N = `microbatches` to an update."""
    check_flag("pipemare", "correct", correct)
    check_count("pipemare", "microbatches", microbatches)
    check_count("pipemare", "reschedule", reschedule, most=None)
    return Method(
        name="pipemare",
        summary="the PB clock with a corrected backward" + (" and rescheduled steps" if reschedule else ""),
        schedule=partial(pipelined_backprop, microbatches=microbatches),
        synchronous=False,
        weights="live",
        planning=PB_CLOCK if microbatches == 1 else None,
        cure=Cure(
            backward=Correction(lambda place: place.delay) if correct else None,
            reschedule=reschedule,
        ),
    )
