"""`recompute=`, an option of every method: forwards keep no graph and are run again for their backward.

Where a policy keeps the weights of a forward (synchronous methods, stash, 2BW) the second forward sees the same ones,
and training is the same to the last bit. Where it does not, a recompute sees the weights as they then stand, and the
cures for delay reach it: PipeMare's T2 has it look back as far as its forward lies behind, a prediction aims at the
version that the forward aimed at. (Ours, after PipeMare, Yang et al. 2021, arXiv 1910.05124, whose own formula could
not be retrieved.)
"""

from dataclasses import replace
from typing import Any

from stretto.errors import UsageError
from stretto.methods.cure import Correction, Place, Prediction
from stretto.methods.definition import Method


def recomputing(method: Method, recompute: Any) -> Method:
    """The method with recomputation: None or False for none; True, or the number of stages of a segment.

    Raises UsageError for anything else, and for a prediction that does not say where a recompute should look.
    """
    if recompute is None or recompute is False:
        return method
    if not isinstance(recompute, int) or recompute < 1:
        raise UsageError(f"{method.name}(recompute={recompute!r}): True, False, or how many stages a segment has")
    cure = replace(method.cure, recompute=recompute_cure(method)) if method.weights == "live" else method.cure
    return replace(method, recompute=recompute, cure=cure)


def recompute_cure(method: Method) -> Prediction | Correction | None:
    """The cure of a recompute that sees other weights than its forward; None for the current weights."""
    forward, backward = method.cure.forward, method.cure.backward
    if isinstance(backward, Correction):
        span = backward.span
        return Correction(lambda place: span(place) - (place.recompute or 0))
    if forward is None:
        return None
    horizon = forward.horizon
    if horizon(Place(0, 9, 9, 0.9)) == horizon(Place(0, 9, 4, 0.9)):
        raise UsageError(
            f"{method}: a recompute runs later than its forward, so its horizon has to follow from the delay: leave "
            "horizon= out, use 'decayed', or keep the weights with stash=True"
        )
    return replace(forward, horizon=lambda place: horizon(place._replace(delay=place.recompute or 0)))
