"""Activation recomputation: a forward keeps no graph, a second one, C, makes it shortly before the backward.

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
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from stretto.errors import UsageError
from stretto.schedule.action import Action
from stretto.schedule.schedule import Schedule

BESIDE = "L"  # needs no graph of the stage: what its micro-batch keeps for it does not matter here


def with_recompute(schedule: Schedule, size: int | None = None) -> Schedule:
    """The schedule with a C before each backward of the stages that need fewer graphs with it.

    `size` is the number of stages of a segment, from stage 0 on; the last may be shorter. By default it is 1 where
    every minibatch drains, else sqrt(S), rounded. Stages that would not gain are left as they are: the schedule
    may come back unchanged. Raises UsageError for longer segments where every minibatch drains.
    """
    num_stages = schedule.num_stages
    drains = all(action.microbatch >= 0 for body in schedule.body for action in body if action.kind != BESIDE)
    if drains and size is not None and size > 1 and num_stages > 1:
        raise UsageError(f"recompute={size}: in a pipeline that drains with every minibatch the stages of a segment "
                         "would wait for each other; use recompute=True, each stage on its own")  # fmt: skip
    size = size or (1 if drains else max(1, round(math.sqrt(num_stages))))
    orders = schedule.body if drains else map(schedule.of_stage, range(num_stages))
    waiting = {stage for order in orders for stage in waits(order)}
    last_of: dict[int, int] = {}  # recomputing stage -> last of its segment
    for first in range(0, num_stages, size):
        last = min(first + size, num_stages) - 1
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
