"""How long each action takes, from a few numbers a stage."""

import math
from collections.abc import Sequence

from stretto.errors import UsageError
from stretto.simulate.simulator import Durations

Times = Sequence[float] | None  # one for all stages, or one each


def stage_times(
    num_stages: int,
    *,
    forward: Times = None,
    backward: Times = None,
    input_gradient: Times = None,
    weight_gradient: Times = None,
    update: Times = None,
) -> Durations:
    """Forward 1, backward twice the forward, its two halves (I, W) equal, update 0, but for what is given.

    Where one half is given the other is the rest of the backward, and where only the two halves are, the backward is
    both. A kind of action that has no time here takes none. Raises UsageError for a number of times that does not fit
    the stages, and for a time that is negative.
    """

    def read(name: str, given: Times) -> list[float] | None:
        return None if given is None else spread(name, given, num_stages)

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
    again = f  # C: a forward run again for its backward
    times = {"F": f, "B": b, "I": i, "W": w, "U": read("update", update) or [0.0] * num_stages, "C": again}
    return lambda action: times[action.kind][action.stage] if action.kind in times else 0.0


def spread(name: str, given: Sequence[float], num_stages: int) -> list[float]:
    """One time a stage from one for all, or from one each. Raises UsageError for any other number of them."""
    for time in given:
        if not 0 <= time < math.inf:
            raise UsageError(f"{name}={time:g}: a time is 0 or more")
    if len(given) == 1:
        return list(given) * num_stages
    if len(given) != num_stages:
        raise UsageError(f"{name} has {len(given)} times for {num_stages} stages: give one for all, or {num_stages}")
    return list(given)


def rest(whole: Sequence[float], name: str, part: Sequence[float]) -> list[float]:
    """What is left of the backward. Raises UsageError where the part is the longer one."""
    for stage, (all_of_it, some) in enumerate(zip(whole, part, strict=True)):
        if some > all_of_it:
            raise UsageError(
                f"{name}={some:g} is more than the whole backward of stage {stage}, {all_of_it:g}: give both halves, "
                "or a longer backward"
            )
    return [all_of_it - some for all_of_it, some in zip(whole, part, strict=True)]
