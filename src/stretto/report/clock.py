"""How long each method took to each cut-off by the clock, where its workers were processes of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.report.panel import Arrival, Panel
from stretto.report.speedup import baseline


@dataclass(frozen=True)
class Clocked:
    """A method's soonest run to one cut-off, against backprop's soonest."""

    method: str
    arrival: Arrival | None  # None: never reached
    times: float | None  # backprop's seconds / this one's: above 1 is sooner. None: nothing to compare


def clocked(panel: Panel, methods: Sequence[str]) -> tuple[Clocked, ...]:
    """One entry for each method, in order."""
    reference = baseline(methods)
    other = panel.soonest(reference) if reference is not None else None
    return tuple(_against(other, method, panel.soonest(method)) for method in methods)


def _against(reference: Arrival | None, method: str, arrival: Arrival | None) -> Clocked:
    if reference is None or arrival is None or arrival.point.seconds <= 0:  # as good as that before its first step
        return Clocked(method, arrival, None)
    return Clocked(method, arrival, reference.point.seconds / arrival.point.seconds)
