"""How long each action takes, from a few numbers for each stage."""

import math
from collections.abc import Sequence

from stretto.errors import UsageError
from stretto.simulate.simulator import Durations

Times = Sequence[float] | None  # one for all stages, or one each


def action_durations(
    num_stages: int,
    *,
    forward: Times = None,
    backward: Times = None,
    input_gradient: Times = None,
    weight_gradient: Times = None,
    update: Times = None,
    learn: Times = None,
) -> Durations:
    """The durations of actions for `simulate`: by default F 1, B twice the F, its halves I and W equal, U 0, L as F.

    Where only one half is given, the other is the rest of the backward; where only both halves are given, the backward
    is their sum. C (recompute) takes as long as F; any other kind of action takes no time. Raises UsageError for a
    number of times that does not fit the stages, and for a negative time.
    """

    def read(name: str, times: Times) -> list[float] | None:
        return None if times is None else spread(name, times, num_stages)

    f = read("forward", forward) or [1.0] * num_stages
    b, i, w = (
        read("backward", backward),
        read("input-gradient", input_gradient),
        read("weight-gradient", weight_gradient),
    )
    if b is None:
        both = None if i is None or w is None else [sum(halves) for halves in zip(i, w, strict=True)]
        b = both or [2 * time for time in f]
    if i is None:
        i = [time / 2 for time in b] if w is None else rest(b, "weight-gradient", w)
    if w is None:
        w = rest(b, "input-gradient", i)
    times = {"F": f, "B": b, "I": i, "W": w, "U": read("update", update) or [0.0] * num_stages, "C": f}
    times["L"] = read("learn", learn) or f
    return lambda action: times[action.kind][action.stage] if action.kind in times else 0.0


def spread(name: str, times: Sequence[float], num_stages: int) -> list[float]:
    """One time for each stage, from one for all or one each. Raises UsageError for another number, or one below 0."""
    for time in times:
        if not 0 <= time < math.inf:
            raise UsageError(f"{name}={time:g}: a time is 0 or more")
    if len(times) == 1:
        return list(times) * num_stages
    if len(times) != num_stages:
        raise UsageError(f"{name} has {len(times)} times for {num_stages} stages: give one for all, or {num_stages}")
    return list(times)


def rest(whole: Sequence[float], name: str, part: Sequence[float]) -> list[float]:
    """One half of each stage's backward, given the other. Raises UsageError where that is longer than the backward."""
    for stage, (backward, half) in enumerate(zip(whole, part, strict=True)):
        if half > backward:
            raise UsageError(
                f"{name}={half:g} is more than the whole backward of stage {stage}, {backward:g}: give both halves, "
                "or a longer backward"
            )
    return [backward - half for backward, half in zip(whole, part, strict=True)]
