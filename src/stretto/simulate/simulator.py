"""Time on paper: when each action would start and end, given what each one costs."""

from collections import deque
from collections.abc import Callable

import numpy as np

from stretto.errors import ScheduleError, UsageError
from stretto.schedule import Action, Edge, Rules, Schedule
from stretto.schedule.lower import Lowered, lower
from stretto.schedule.validity import explain
from stretto.simulate.engine import BUFFERED, RENDEZVOUS, Floats, Outcome, execute, wires
from stretto.simulate.network import Link, Network, Sizes
from stretto.simulate.noise import Noise
from stretto.simulate.timeline import Timeline

Durations = Callable[[Action], float]


def unit_costs(action: Action) -> float:
    """F, C, I and W take 1, B both halves of the backward, R and an update nothing."""
    return {"F": 1, "C": 1, "B": 2, "I": 1, "W": 1, "A": 0, "R": 0, "U": 0, "M": 0}[action.kind]


def no_bytes(edge: Edge) -> float:
    """The size of values that keep no lane busy."""
    return 0.0


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
    """Let `turns` turns enter and the pipeline drain. Times are in the unit of `durations`.

    A value is there for its own worker at once. For another one it is a message of `sizes(edge)` bytes: with the time
    that they take on its link (`network`) it keeps the sender's send lane busy, and the receiver's receive lane as
    from the link's latency later, or as from when that lane is free; on a link that several pairs share it waits its
    turn in between. Every lane and every shared link takes messages one at a time, first come, first served; who comes
    at the same time, in the order of the workers. `latency` is short for a network of nothing else.

    Sending keeps nobody from computing. With `sends="buffered"` a message goes as soon as the send lane is free; with
    "rendezvous" not before its receiver has come to the action that needs it. With `overlap` a worker computes while
    its replicas agree (A, M). What the loader gives is there from the start.
    `durations` and, if given, `noise` say how long each action takes, micro-batch by micro-batch.
    Raises ScheduleError at a deadlock, with who waits for what.
    """
    if sends not in (BUFFERED, RENDEZVOUS):
        raise UsageError(f"sends={sends!r}: choose {BUFFERED} or {RENDEZVOUS}")
    lowered = lower(schedule, rules, overlap=overlap)
    ways = wires(lowered, Network(Link(latency)) if network is None else network, sizes)
    times = [[durations(lowered.action(p, n)) for n in range(turns)] for p in range(len(lowered.actions))]
    table = np.array(times, np.float64).reshape(len(times), turns)
    if noise is not None:
        table = table * noise.factors(lowered, turns)
    outcome = execute(lowered, turns, table, ways, sends=sends)
    finished(lowered, rules, outcome)
    return Timeline(lowered, rules, ways, outcome)


def finished(lowered: Lowered, rules: Rules, outcome: Outcome) -> None:
    """Raise ScheduleError unless everything was done."""
    schedule, turns = lowered.schedule, outcome.turns
    if outcome.done == len(lowered.actions) * turns:
        return
    done = {lowered.action(position, minibatch) for position, minibatch in np.argwhere(outcome.starts >= 0).tolist()}
    there = {edge for action in done for edge in rules.makes(action)}
    there |= {edge for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    unrolled = [schedule.unroll(worker, turns) for worker in range(schedule.num_workers)]
    left = [deque(action for action in own if action not in done) for own in unrolled]
    raise ScheduleError(f"deadlock: {explain(left, rules, there)}")


def table_of(lowered: Lowered, durations: Durations) -> Floats:
    """The duration of every action where all minibatches are alike: one column."""
    return np.array([[durations(action)] for action in lowered.actions], np.float64)
