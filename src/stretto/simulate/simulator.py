"""Simulation: when each action of a schedule starts and ends, given the duration of each."""

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
    """The error that names the actions that could not run, and what they wait for."""
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
