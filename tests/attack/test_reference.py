"""The reference of `configurations` knows one method from another: a comparison that cannot fail is none."""

from dataclasses import replace

import pytest

from attack.configurations import TOLERANCE, Case, by_hand
from pairwise import slow_where

CHANGES = {
    "delay": {"delay": lambda s, stages: 0},
    "live": {"live": False},
    "ahead": {"ahead": None},
    "behind": {"behind": None},
    "spike": {"spike": False},
    "reschedule": {"reschedule": None},
    "mean": {"mean": False},
    "segment": {"segment": None},
    "warmup": {"warmup": 0},
}


def matters(what, here):
    """Whether a case of three stages or more has the part, so that without it another network is trained."""
    d = here.definition
    has = {
        "delay": d.live and here.stages > 2,
        "live": d.live and d.behind is None,
        "segment": d.segment is not None and d.live and here.stages > 3,
        "warmup": 0 < d.warmup < here.minibatches - 2 and d.delay(0, here.stages) > 0,
    }.get(what, bool(getattr(d, what)))
    return has and here.stages > 2 and here.minibatches > 6 and not here.network.frozen and here.replicas == 1


QUICK = ("delay",)  # of what slow tests rest on


@pytest.mark.parametrize("what", slow_where(lambda what: what not in QUICK, CHANGES))
def test_without_a_part_of_its_definition_a_method_is_another(what):
    """Two of the cases that have the part tell; a network may be dead, or a run too short."""
    told = 0
    for seed in range(600):
        here = Case(seed)
        if matters(what, here):
            wanted = by_hand(here)
            here.definition = replace(here.definition, **CHANGES[what])
            told += by_hand(here).differs(wanted)[0] > 100 * TOLERANCE
            if told == 2:
                return
    raise AssertionError(f"{told} of 600 cases tell {what}")
