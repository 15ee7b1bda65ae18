"""Pipelined Backpropagation and its cures (Kosson et al. 2021, arXiv 2003.11666), and PACI.

One forward and one backward of every stage in every tick, no flush: no worker is ever idle, and stage s works with
gradients 2(S-1-s) updates old. A backward sees the weights as they stand, or with `stash` those of its forward.

PipeMare (Yang et al. 2021, arXiv 1910.05124): smaller steps where gradients are stale, and a backward that looks back.

T1 divides the learning rate by max(tau, 1)^p, p falling from 1 to 0 over K updates; T2 gives the backward an estimate
of the weights its forward saw, tau updates back. For both tau is the mean delay of the micro-batches of an update, a
fraction: with N of them tau = tau_f - tau_b = 2(S-1-s)/N on the PB clock, where tau_b = 0. (The paper counts one slot
more, (2(S-s)-1)/N.)
"""

from dataclasses import replace
from functools import partial
from typing import Literal

from stretto.errors import UsageError
from stretto.methods.cure import Correction, Cure, Feedback, Place, Prediction, Rotate, cures_in_words, step_cure
from stretto.methods.definition import Method
from stretto.methods.planning import Planning
from stretto.methods.synchronous_pipelines import check_count, check_flag
from stretto.options.checks import is_among, shown
from stretto.schedule.library.pipedream import paci as paci_schedule
from stretto.schedule.library.pipedream import pipelined_backprop

Form = Literal["velocity", "weight", "step"]
PB_CLOCK = Planning(held=lambda at: 2 * at.above + 1, delay=lambda at: 2 * at.above, messages="hidden")


def decayed(place: Place) -> float:
    """m (1 - m^D) / (1 - m) = m + m^2 + ... + m^D: how far the current velocity alone carries in D updates.

    On quadratics, prediction that far ahead equals spike compensation (Kosson et al. 2021).
    """
    m = place.momentum
    if m >= 1:
        return place.delay
    return m * (1 - float(m**place.delay)) / (1 - m)


def prediction(predict: Form | None, horizon: int | Literal["decayed"] | None) -> Prediction | None:
    """Linear weight prediction over the stage's delay, a fixed horizon, or the decayed one."""
    if not is_among(predict, (None, "velocity", "weight", "step")):
        raise UsageError(f"pb(predict={shown(predict)}): choose 'velocity', 'weight', 'step' or None")
    if horizon is not None and predict is None:
        raise UsageError(f"pb(horizon={shown(horizon)}) needs a prediction: add predict='velocity', 'weight' or 'step'")
    if predict is None:
        return None
    if horizon is None:
        return Prediction(predict, lambda place: place.delay)
    if is_among(horizon, ("decayed",)):
        return Prediction(predict, decayed)
    if isinstance(horizon, bool) or not isinstance(horizon, int | float) or horizon < 0:
        raise UsageError(f"pb(horizon={shown(horizon)}): a number of updates, 'decayed', or None for the stage's delay")
    return Prediction(predict, lambda _: horizon)


def pb(
    *,
    spike: bool = False,
    predict: Form | None = None,
    horizon: int | Literal["decayed"] | None = None,
    stash: bool = False,
    feedback: Feedback = 0.0,
    rotate: Rotate = False,
    refresh: int | None = None,
) -> Method:
    """Pipelined Backpropagation, with any of its cures.

    spike: spike compensation, for SGD with momentum, Adam, AdamW, NAdam, Muon, SOAP and Lion. predict: weight
    prediction along the velocity or the last change of the weights (linear weight prediction), or along the optimizer's
    own step (as in PipeOptim). stash: backwards see the weights of their forward. Both cures use the stage's
    steady-state delay, also in fill and drain. horizon: how many updates to look ahead instead.

    feedback: how many times a step's difference to the last one is added to it (update-level error feedback), for any
    optimizer; "delay" for as many times as a stage's delay. rotate: matrices are stepped by Adam or AdamW in a rotated
    basis of both sides (True) or of the outputs ("one-sided"); refresh: every how many updates, or so, it is refreshed
    (10), more often where delays are longer.
    """
    check_flag("pb", "spike", spike)
    check_flag("pb", "stash", stash)
    forward = prediction(predict, horizon)
    step = step_cure("pb", feedback, rotate, refresh)
    refuse_together(spike, predict, step)
    cures = [name for name, on in (("spike", spike), ("predict", predict), ("stash", stash)) if on]
    return Method(
        name="pb",
        summary=f"Pipelined Backpropagation{' with ' if cures else ''}{', '.join(cures)}{cures_in_words(step)}",
        schedule=pipelined_backprop,
        synchronous=False,
        weights="stash" if stash else "live",
        cure=replace(step, forward=forward, spike=spike),
        planning=PB_CLOCK,
    )


def refuse_together(spike: bool, predict: Form | None, step: Cure) -> None:
    """Raise UsageError for cures that would make up for one delay twice, or that want different optimizers."""
    if step.feedback is not None and (spike or predict is not None):
        other = "spike=True" if spike else f"predict={predict}"
        raise UsageError(
            f"pb(feedback=..., {other}): both make up for the same delay, along the last step: choose one of them"
        )
    if step.rotate is not None and predict not in (None, "weight"):
        raise UsageError(
            f"pb(rotate=..., predict={predict}): rotation is for Adam and AdamW, whose averages predict={predict} "
            "cannot read in a rotated basis: choose one of them, or predict='weight'"
        )


def pb_sc() -> Method:
    """Spike compensation alone."""
    return pb(spike=True)


def pb_lwp(*, horizon: int | Literal["decayed"] | None = None) -> Method:
    """Linear weight prediction, velocity form."""
    return pb(predict="velocity", horizon=horizon)


def pb_lwpw(*, horizon: int | Literal["decayed"] | None = None) -> Method:
    """Linear weight prediction, weight form."""
    return pb(predict="weight", horizon=horizon)


def pb_lwp_sc(*, horizon: int | Literal["decayed"] | None = None) -> Method:
    """Weight prediction (weight form) and spike compensation: the paper's best."""
    return pb(predict="weight", spike=True, horizon=horizon)


def paci(*, every: int = 2, feedback: Feedback = 0.0, rotate: Rotate = False, refresh: int | None = None) -> Method:
    """Asynchronous 1F1B, updated after every `every` backwards: fewer updates, less delay, one version of the weights.

    arXiv 2606.07881. Delays are at most ceil((S-1)/every). feedback, rotate, refresh: cures of the optimizer's step, as
    of `pb`; "delay" is the mean delay of the micro-batches of an update.
    """
    check_count("paci", "every", every)
    cure = step_cure("paci", feedback, rotate, refresh)
    return Method(
        name="paci",
        summary=f"asynchronous 1F1B, one update in {every} micro-batches{cures_in_words(cure)}",
        schedule=lambda num_stages, num_workers: paci_schedule(num_stages, num_workers, every),
        synchronous=False,
        weights="live",
        cure=cure,
        planning=Planning(cut="every", held=lambda at: at.above + 1, delay=lambda at: at.above / at.microbatches),
    )


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
        cure=Cure(backward=Correction(lambda place: place.delay) if correct else None, reschedule=reschedule),
    )
