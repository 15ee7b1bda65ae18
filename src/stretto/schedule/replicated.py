"""A schedule whose pipeline has replicas that agree at each of its updates.

1F1B with two stages and two micro-batches, every replica alike. Replicas add up their gradients before an update (A),
or merge their weights after it (M), or first one and later the other (AM):

    1 .0a1bAU       1 .0a1bUM
    0 01.a.bAU      0 01.a.bUM
"""

from typing import Literal

from stretto.schedule.action import Action
from stretto.schedule.schedule import Schedule

Agreement = Literal["A", "M", "AM"]


def with_agreement(schedule: Schedule, kind: Agreement) -> Schedule:
    """A before every stage's update, or before its R if all stages reduce; M right after every update; AM is both."""
    first = "R" if any(action.kind == "R" for actions in schedule.body for action in actions) else "U"
    body = []
    for actions in schedule.body:
        with_kind: list[Action] = []
        for action in actions:
            if "A" in kind and action.kind == first:
                with_kind.append(action._replace(kind="A"))
            with_kind.append(action)
            if "M" in kind and action.kind == "U":
                with_kind.append(action._replace(kind="M"))
        body.append(tuple(with_kind))
    return Schedule(tuple(body), schedule.per_turn)
