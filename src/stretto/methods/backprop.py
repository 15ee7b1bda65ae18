"""Backpropagation: one loss at the top, whose gradient reaches every stage."""

from stretto.methods.definition import Method
from stretto.schedule import Reach
from stretto.schedule.library import local


def whole_network(num_stages: int) -> Reach:
    """One head at the top, whose gradient reaches every stage."""
    return Reach((*[None] * (num_stages - 1), num_stages - 1))


def backprop() -> Method:
    """The reference that every other method is compared with."""
    return Method(
        name="backprop",
        summary="one loss at the top, its gradient reaches every stage",
        reach=whole_network,
        schedule=local.one_sweep,
        synchronous=True,
    )
