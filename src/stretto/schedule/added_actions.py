"""Schedules with actions added: recomputes (C), norms of all gradients (R), agreement of replicas (A, M).

**C.** Activation recomputation: a forward keeps no graph, a second one, C, makes it shortly before the backward.

Where a pipeline drains with every minibatch each stage recomputes for itself, right before its backward, and keeps its
input until then (Chen et al. 2016, arXiv 1604.06174; Huang et al. 2019, arXiv 1811.06965). C needs nothing from other
workers, so it hides in the wait for the gradient. GPipe, two micro-batches, F = C = 1, B = 2; digits are forwards,
letters backwards, stars recomputes:

    1 .01*aa*bb..
    0 01*...aa*bb

Where it never drains, inputs would be kept as long as graphs were. There the stages form *segments* and only the first
of a segment keeps its input: the segment runs forward once more just before the backward reaches its last stage, each
stage feeding the next (after PipeMare, Yang et al. 2021, arXiv 1910.05124). Stage s of a segment that ends at stage e
makes its graph D_s - D_e backwards ahead instead of D_s, its first stage holds D_e + 1 inputs. In segments of sqrt(S)
stages the PB clock holds about 2 S^1.5 inputs and graphs instead of S^2. The last segment is left as it is: its last
stage's backward follows its forward at once, a recompute could not come later. The PB clock, segments of two:

    3 ...0aa1bb2cc3dd4ee5ff.......
    2 ..012.aa3bb4cc5dd.ee.ff.....
    1 .01234*.aa5*bb*cc*dd*ee*ff..
    0 01234*5**.aa*.bb*cc*dd.ee.ff

**R.** In a synchronous schedule stages exchange the norms of their gradients before any of them updates.

1F1B with three stages and two micro-batches; R sends the norms of a stage's gradients to all stages, and U waits for
all of them:

    2 ..0aa1bbRU
    1 .01.aa.bbRU
    0 01..aa..bbRU

**A, M.** Replicas of a pipeline agree at each of its updates.

1F1B with two stages and two micro-batches, every replica alike. Replicas add up their gradients before an update (A),
or merge their weights after it (M), or first one and later the other (AM):

    1 .0a1bAU       1 .0a1bUM
    0 01.a.bAU      0 01.a.bUM
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from stretto.errors import ScheduleError, UsageError
from stretto.schedule.action import Action
from stretto.schedule.schedule import Schedule

BESIDE = "L"  # needs no graph of the stage: what its micro-batch keeps for it does not matter here


def with_recompute(schedule: Schedule, size: int | None = None, pipelines: Sequence[range] = ()) -> Schedule:
    """The schedule with a C before each backward of the stages that need fewer graphs with it.

    `size` is the number of stages of a segment, from the first stage of each of `pipelines` on (of all stages unless
    they are given); the last may be shorter. By default it is 1 where every minibatch drains, else the root of the
    pipeline's stages, rounded. Stages that would not gain are left as they are: the schedule may come back unchanged.
    Raises UsageError for longer segments where every minibatch drains.
    """
    num_stages = schedule.num_stages
    pipelines = pipelines or [range(num_stages)]
    drains = all(action.microbatch >= 0 for body in schedule.body for action in body if action.kind != BESIDE)
    if drains and size is not None and size > 1 and num_stages > 1:
        raise UsageError(
            f"recompute={size}: in a pipeline that drains with every minibatch the stages of a segment "
            "would wait for each other; use recompute=True, each stage on its own"
        )
    orders = schedule.body if drains else map(schedule.of_stage, range(num_stages))
    waiting = {stage for order in orders for stage in waits(order)}
    last_of: dict[int, int] = {}  # recomputing stage -> last of its segment
    for pipeline in pipelines:
        length = size or (1 if drains else max(1, round(math.sqrt(len(pipeline)))))
        for first in range(pipeline.start, pipeline.stop, length):
            last = min(first + length, pipeline.stop) - 1
            if last in waiting:
                last_of |= dict.fromkeys(range(first, last + 1), last)
    microbatches = {last: backwards(schedule, last) for last in set(last_of.values())}
    recomputed = {stage: microbatches[last] for stage, last in last_of.items()}
    return replace(schedule, body=tuple(tuple(inserted(body, recomputed)) for body in schedule.body))


def waits(order: Sequence[Action]) -> Iterator[int]:
    """The stages with another action between a forward and its backward in `order`: they have to keep its graph."""
    following = dict(pairwise(action for action in order if action.kind != BESIDE))
    for action in order:
        if action.kind == "F":
            after = following.get(action)
            if after not in (action._replace(kind="B"), action._replace(kind="I")):
                yield action.stage


def inserted(body: Sequence[Action], recomputed: Mapping[int, Sequence[int]]) -> Iterator[Action]:
    """A worker's actions with recomputes: before a stage's k-th backward, a recompute for its micro-batch number k.

    `recomputed` has the micro-batches of each stage: those of the backwards of its segment's last stage, in their
    order. So all stages of a segment recompute a micro-batch in the same turn.
    """
    done: Counter[int] = Counter()
    for action in body:
        if action.kind in "BI" and action.stage in recomputed:
            yield Action("C", action.stage, recomputed[action.stage][done[action.stage]])
            done[action.stage] += 1
        yield action


def backwards(schedule: Schedule, stage: int) -> list[int]:
    """The micro-batches of a stage's backwards, in their order."""
    return [action.microbatch for action in schedule.of_stage(stage) if action.kind in "BI"]


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
