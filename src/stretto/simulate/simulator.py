"""Simulation: when each action of a schedule starts and ends, given the duration of each, which may vary by chance."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.errors import ScheduleError, UsageError
from stretto.schedule import Action, Rules, Schedule
from stretto.schedule.lower import Lowered, lower
from stretto.schedule.validity import explain
from stretto.simulate.engine import Floats, SimulatedTimes, Transfers, execute, transfers
from stretto.simulate.network import BUFFERED, Link, Network, Sizes, Transport, no_bytes
from stretto.simulate.timeline import Timeline


@dataclass(frozen=True)
class Noise:
    """Random factors on the durations of actions. The same seed gives the same factors.

    `jitter` is the standard deviation of the logarithm of a factor whose median is 1. With probability `straggling` an
    action takes `slowdown` times as long besides. `workers` has constant factors of slow workers (2: half as fast).
    Raises UsageError for a negative or infinite number, and for a `straggling` above 1.
    """

    seed: int = 0
    jitter: float = 0.0
    straggling: float = 0.0
    slowdown: float = 1.0
    workers: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < np.inf:
            raise UsageError(f"jitter={self.jitter:g}: a standard deviation is 0 or more")
        if not 0 <= self.straggling <= 1:
            raise UsageError(f"straggling={self.straggling:g}: a probability is between 0 and 1")
        for factor in (self.slowdown, *self.workers.values()):
            if not 0 <= factor < np.inf:
                raise UsageError(f"a factor of {factor:g} on times: choose 0 or more")

    def factors(self, lowered: Lowered, turns: int) -> Floats:
        """A factor for each action (rows) and minibatch (columns). More turns do not change earlier factors."""
        size = len(lowered.actions)
        normal, uniform = (np.random.default_rng([self.seed, stream]) for stream in range(2))
        factors = np.exp(self.jitter * normal.standard_normal((turns, size)))
        factors[uniform.random((turns, size)) < self.straggling] *= self.slowdown
        slow = [self.workers.get(lowered.lanes[lane].worker, 1.0) for lane in lowered.lane_of]
        return np.ascontiguousarray((factors * slow).T)


Durations = Callable[[Action], float]


def unit_costs(action: Action) -> float:
    """An action's duration in units: 1 for F, C, I, W and L, 2 for B (both halves of the backward), else 0.

    L is what a module as large as its stage takes at most: smaller ones take less.
    """
    return {"F": 1, "C": 1, "B": 2, "I": 1, "W": 1, "A": 0, "R": 0, "U": 0, "M": 0, "L": 1}[action.kind]


def simulate(
    schedule: Schedule,
    rules: Rules,
    turns: int,
    durations: Durations = unit_costs,
    *,
    latency: float = 0,
    network: Network | None = None,
    sizes: Sizes = no_bytes,
    sends: str = BUFFERED,
    overlap: bool = False,
    noise: Noise | None = None,
) -> Timeline:
    """The timeline of `turns` turns, until the pipeline has drained. Times are in the unit of `durations`.

    A value is available to its own worker at once. For another worker it is a message of `sizes(edge)` bytes, which
    take some time on the pair's link (`network`). The message occupies the sender's send lane for that time, and for as
    long the receiver's receive lane, which begins one latency after the send lane or, if later, when it is free. On a
    link that several pairs share, messages queue in between. Every lane and every shared link takes messages one at a
    time, first come, first served; messages that come at the same time are served in the order of their senders.
    `latency` alone stands for a network whose links have that latency and no other cost.

    Sending does not keep a worker from computing; see `Transport` for `sends`. With `overlap` a worker computes while
    its replicas agree (A, M). Values from the loader are available from the start. `durations` gives the duration of
    each action, micro-batch by micro-batch; `noise` multiplies them by random factors.
    Raises ScheduleError at a deadlock, with who waits for what, and UsageError for an unknown `sends`.
    """
    links = Network(Link(latency)) if network is None else network
    transport = Transport(network=links, sizes=sizes, sends=sends)
    lowered = lower(schedule, rules, overlap=overlap)
    times = [[durations(lowered.action(p, n)) for n in range(turns)] for p in range(len(lowered.actions))]
    table = np.array(times, np.float64).reshape(len(times), turns)
    if noise is not None:
        table = table * noise.factors(lowered, turns)
    return run_to_end(lowered, rules, turns, table, transfers(lowered, transport, turns))


def run_to_end(lowered: Lowered, rules: Rules, turns: int, table: Floats, transfer_times: Transfers) -> Timeline:
    """The timeline of `turns` turns; `table` has a duration for each action (rows) and minibatch (columns, or one).

    Raises ScheduleError at a deadlock.
    """
    outcome = execute(lowered, turns, table, transfer_times)
    if outcome.done < len(lowered.actions) * turns:
        raise deadlock(lowered, rules, outcome)
    return Timeline(lowered, rules, transfer_times, outcome)


def deadlock(lowered: Lowered, rules: Rules, outcome: SimulatedTimes) -> ScheduleError:
    """The error with the actions that could not run, and the values that they wait for."""
    schedule, turns = lowered.schedule, outcome.turns
    done = {lowered.action(position, minibatch) for position, minibatch in np.argwhere(outcome.starts >= 0).tolist()}
    available = {edge for action in done for edge in rules.makes(action)}
    available |= {edge for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    lists = [schedule.unroll(worker, turns) for worker in range(schedule.num_workers)]
    remaining = [deque(action for action in actions if action not in done) for actions in lists]
    return ScheduleError(f"deadlock: {explain(remaining, rules, available)}")


def table_of(lowered: Lowered, durations: Durations) -> Floats:
    """The durations of all actions, (actions, 1), where they do not depend on the minibatch."""
    return np.array([[durations(action)] for action in lowered.actions], np.float64)


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
