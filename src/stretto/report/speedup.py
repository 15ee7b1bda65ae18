"""How much sooner than backprop each method reaches a cut-off, and what that costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.report.panel import Arrival, Panel
from stretto.report.record import family

BASELINE = "backprop"


@dataclass(frozen=True)
class Speedup:
    """A method's fastest run to one cut-off, against backprop's fastest."""

    method: str
    arrival: Arrival | None  # None: never reached
    serial: float | None  # backprop's serial compute / this one's: above 1 is faster. None: nothing to compare
    total: float | None  # this one's total compute / backprop's, at those same two runs: above 1 is dearer


def baseline(methods: Sequence[str]) -> str | None:
    """Find the method that the others are measured against, if it is among them."""
    return next((method for method in methods if family(method) == BASELINE), None)


def speedups(panel: Panel, methods: Sequence[str]) -> tuple[Speedup, ...]:
    """One entry for each method, in order. Each method's run is the one with the least serial compute."""
    reference_method = baseline(methods)
    reference = panel.fastest(reference_method) if reference_method is not None else None
    return tuple(_against(reference, method, panel.fastest(method)) for method in methods)


def _against(reference: Arrival | None, method: str, arrival: Arrival | None) -> Speedup:
    if reference is None or arrival is None:
        return Speedup(method, arrival, None, None)
    own, other = arrival.point, reference.point
    if min(own.serial_flops, other.total_flops) <= 0:  # as good as that before its first update
        return Speedup(method, arrival, None, None)
    return Speedup(method, arrival, other.serial_flops / own.serial_flops, own.total_flops / other.total_flops)
