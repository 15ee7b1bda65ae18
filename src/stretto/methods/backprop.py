"""Backpropagation: one loss at the top, whose gradient reaches every stage."""

from stretto.methods.definition import Method
from stretto.methods.planning import Planning
from stretto.schedule.library.backprop_and_local import one_sweep

BASELINE = "backprop"  # the name of what every other method is compared with


def backprop() -> Method:
    """One loss, whose gradient reaches every stage before the next minibatch enters."""
    return Method(
        name=BASELINE,
        summary="one loss at the top, its gradient reaches every stage",
        schedule=one_sweep,
        synchronous=True,
        planning=Planning(workers=(1, 1)),
    )
