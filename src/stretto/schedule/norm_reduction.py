"""A synchronous schedule whose stages exchange the norms of their gradients before any of them updates.

1F1B with three stages and two micro-batches; R sends the norms of a stage's gradients to all stages, and U waits for
all of them:

    2 ..0aa1bbRU
    1 .01.aa.bbRU
    0 01..aa..bbRU
"""

from stretto.errors import ScheduleError
from stretto.schedule.action import Action
from stretto.schedule.schedule import Schedule


def with_reduce(schedule: Schedule) -> Schedule:
    """Replace each update by R, and put all updates at the end of their worker's turn: for global-norm clipping.

    Raises ScheduleError for a schedule whose updates do not end a minibatch:
    a stage would wait for gradients of minibatches that have not entered.
    """
    body = []
    for worker, actions in enumerate(schedule.body):
        early = next((action for action in actions if action.microbatch < 0), None)
        if early is not None:
            raise ScheduleError(
                f"worker {worker}: {early} is of an earlier minibatch; only synchronous schedules reduce"
            )
        updates = [action for action in actions if action.kind == "U"]
        body.append((*(Action("R", *action[1:]) if action.kind == "U" else action for action in actions), *updates))
    return Schedule(tuple(body), schedule.per_turn)
