"""Backpropagation: one loss at the top, whose gradient reaches every stage."""

from stretto.methods.definition import Method
from stretto.methods.planning import Planning
from stretto.schedule.library import local

BASELINE = "backprop"  # the name of what every other method is compared with


def backprop() -> Method:
    """One loss, whose gradient reaches every stage before the next minibatch enters."""
    return Method(
        name=BASELINE,
        summary="one loss at the top, its gradient reaches every stage",
        schedule=local.one_sweep,
        synchronous=True,
        planning=Planning(workers=(1, 1)),
    )
