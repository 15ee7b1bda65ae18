"""Time on paper: when each action would start and end, given what each one costs."""

from collections import deque
from collections.abc import Callable

import numpy as np

from stretto.errors import ScheduleError
from stretto.schedule import Action, Rules, Schedule
from stretto.schedule.lower import Lowered, lower
from stretto.schedule.validity import explain
from stretto.simulate.engine import Floats, SimulatedTimes, Transfers, execute, transfers
from stretto.simulate.network import BUFFERED, Link, Network, Sizes, Transport, no_bytes
from stretto.simulate.noise import Noise
from stretto.simulate.timeline import Timeline

Durations = Callable[[Action], float]


def unit_costs(action: Action) -> float:
    """F, C, I and W take 1, B both halves of the backward, R and an update nothing."""
    return {"F": 1, "C": 1, "B": 2, "I": 1, "W": 1, "A": 0, "R": 0, "U": 0, "M": 0}[action.kind]


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

    A value is available to its own worker at once. For another worker it is a message of `sizes(edge)` bytes. The time
    that they take on its link (`network`) keeps the sender's send lane busy, and the receiver's receive lane, which
    begins one latency later, or when it is free; on a link that several pairs share the message queues in between.
    Every lane and every shared link takes messages one at a time, first come, first served; messages that come at the
    same time, in the order of their senders. `latency` is short for a network whose links have nothing else.

    Sending keeps nobody from computing; see `Transport` for `sends`. With `overlap` a worker computes while its
    replicas agree (A, M). What the loader gives is there from the start.
    `durations` and, if given, `noise` say how long each action takes, micro-batch by micro-batch.
    Raises ScheduleError at a deadlock, with who waits for what, and UsageError for other `sends`.
    """
    links = Network(Link(latency)) if network is None else network
    transport = Transport(network=links, sizes=sizes, sends=sends)
    lowered = lower(schedule, rules, overlap=overlap)
    times = [[durations(lowered.action(p, n)) for n in range(turns)] for p in range(len(lowered.actions))]
    table = np.array(times, np.float64).reshape(len(times), turns)
    if noise is not None:
        table = table * noise.factors(lowered, turns)
    return run_to_end(lowered, rules, turns, table, transfers(lowered, transport))


def run_to_end(lowered: Lowered, rules: Rules, turns: int, table: Floats, moves: Transfers) -> Timeline:
    """The timeline of so many turns; `table` has a duration for each action (rows) and minibatch (columns, or one).

    Raises ScheduleError unless everything could be done.
    """
    outcome = execute(lowered, turns, table, moves)
    if outcome.done < len(lowered.actions) * turns:
        raise deadlock(lowered, rules, outcome)
    return Timeline(lowered, rules, moves, outcome)


def deadlock(lowered: Lowered, rules: Rules, outcome: SimulatedTimes) -> ScheduleError:
    """The error that says which actions were left, and what they wait for."""
    schedule, turns = lowered.schedule, outcome.turns
    done = {lowered.action(position, minibatch) for position, minibatch in np.argwhere(outcome.starts >= 0).tolist()}
    available = {edge for action in done for edge in rules.makes(action)}
    available |= {edge for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    lists = [schedule.unroll(worker, turns) for worker in range(schedule.num_workers)]
    left = [deque(action for action in actions if action not in done) for actions in lists]
    return ScheduleError(f"deadlock: {explain(left, rules, available)}")


def table_of(lowered: Lowered, durations: Durations) -> Floats:
    """The duration of every action where all minibatches are alike: one column."""
    return np.array([[durations(action)] for action in lowered.actions], np.float64)
