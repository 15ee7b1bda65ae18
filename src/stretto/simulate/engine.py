"""From a lowered schedule and its side tables to the times of everything: arrays in, arrays out."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.schedule.lower import Lowered, Passing
from stretto.simulate import compiled
from stretto.simulate.kernel import UNKNOWN, Program, State
from stretto.simulate.network import RENDEZVOUS, Transport

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Transfers:
    """What each value that passes between lanes takes on its way, and where it may have to queue.

    Arrays have a row for each value of `Lowered.passings`. A queue is a send lane, a shared link or a receive lane.
    """

    hold: Floats  # how long it occupies lanes and links
    gap: Floats  # how long no other can begin there: `hold` or more
    latency: Floats
    queue: Whole  # (values, 3): the number of its queue at the send lane, link, receive lane; -1 where it never waits
    num_queues: int
    rendezvous: bool = False  # whether a send begins only once its receiver waits


@dataclass(frozen=True)
class SimulatedTimes:
    """When everything happened: a row for each action or value, a column for each minibatch.

    Where a value was never sent, or never came, its time is below 0.
    """

    turns: int
    durations: Floats  # (actions, turns), or (actions, 1) where all minibatches are alike
    starts: Floats
    ranks: Whole  # in which order actions were worked out: no action before one that it waits for
    sent: Floats  # (values, turns): when the send lane began with a value
    linked: Floats  # when a shared link began with it; no rows without shared links
    arrivals: Floats  # when it was there
    done: int  # actions that could be run

    @property
    def ends(self) -> Floats:
        """When each action ended."""
        return self.starts + self.durations


def transfers(lowered: Lowered, transport: Transport) -> Transfers:
    """The times and queues of every value.

    A queue is left out where no message ever waits: all that pass there take no time; or they come from one lane in
    the order in which they arrive, and were as far apart there as they are here.
    """
    size = len(lowered.passings)
    hold, gap, latency = np.zeros(size), np.zeros(size), np.zeros(size)
    numbers: dict[tuple[str, object], int] = {}
    senders: dict[int, set[int]] = {}  # of each queue
    queue = np.full((size, 3), -1, np.int64)
    for value, passing in enumerate(lowered.passings):
        if passing.receiver is None or passing.edge is None:
            continue
        pair = (sender_of(lowered, passing), passing.receiver)
        link = transport.network[pair]
        num_bytes = transport.sizes(passing.edge)
        hold[value], latency[value] = num_bytes * link.seconds_per_byte, link.latency
        gap[value] = num_bytes * max(link.seconds_per_byte, link.gap)
        for column, key in enumerate((("send", pair[0]), ("link", link.shared), ("receive", pair[1]))):
            if key[1] != "":
                queue[value, column] = numbers.setdefault(key, len(numbers))
                senders.setdefault(int(queue[value, column]), set()).add(pair[0])
    for number in range(len(numbers)):
        joins = queue == number
        alone = len(senders[number]) == 1 and not joins[:, 0].any()
        if alone or not gap[joins.any(axis=1)].any():
            queue[joins] = -1
    return Transfers(hold, gap, latency, queue, len(numbers), transport.sends == RENDEZVOUS)


def rounded(turns: int, durations: Floats, moves: Transfers) -> tuple[Floats, Transfers]:
    """Times as multiples of a power of two so small that none of their sums over so many turns is rounded.

    Times that are multiples already, as whole numbers are, stay as they are; others change by less than 1e-8 of a turn.
    """
    longest = turns * (durations.sum() + moves.gap.sum() + moves.latency.sum())
    unit = 2.0 ** (math.ceil(math.log2(longest)) - 52) if longest else 1.0

    def multiples(times: Floats) -> Floats:
        return np.round(times / unit) * unit

    exact = replace(moves, hold=multiples(moves.hold), gap=multiples(moves.gap), latency=multiples(moves.latency))
    return multiples(durations), exact


def sender_of(lowered: Lowered, passing: Passing) -> int:
    """The worker that makes a value."""
    return lowered.lanes[lowered.lane_of[passing.source]].worker


def execute(lowered: Lowered, turns: int, durations: Floats, moves: Transfers) -> SimulatedTimes:
    """Let `turns` minibatches enter and the pipeline drain. `durations` is (actions, turns), or (actions, 1)."""
    actions, values = len(lowered.actions), len(lowered.passings)
    program = program_of(lowered, turns, durations, moves)
    state, done = compiled.run(program, first_state(lowered, program, moves), actions * turns)

    def rows(flat: Any, many: int) -> Any:
        return np.asarray(flat).reshape(many, turns)

    return SimulatedTimes(
        turns,
        durations,
        starts=rows(state.start, actions),
        ranks=rows(state.rank, actions),
        sent=rows(state.sent, values),
        linked=rows(state.linked, values * links_are_shared(moves)),
        arrivals=rows(state.arrival, values),
        done=done,
    )


def links_are_shared(moves: Transfers) -> bool:
    """Whether any message may wait for a link that several pairs of workers share."""
    return bool((moves.queue[:, 1] >= 0).any())


def program_of(lowered: Lowered, turns: int, durations: Floats, moves: Transfers) -> Program:
    """What the kernel reads and never changes."""
    late = np.array(lowered.late, np.int64)
    return Program(
        turns=turns,
        span=turns + int(late.max()) if turns else 0,
        size=max(1, len(lowered.passings)),
        rendezvous=moves.rendezvous,
        first=np.array([lane.first for lane in lowered.lanes], np.int64),
        last=np.array([lane.last for lane in lowered.lanes], np.int64),
        late=late,
        row_stride=durations.shape[1],
        minibatch_stride=int(durations.shape[1] > 1),
        duration=np.ascontiguousarray(durations).ravel(),
        **tables(lowered),
        hold=moves.hold,
        gap=moves.gap,
        latency=moves.latency,
        queue=moves.queue.ravel(),
    )


def first_state(lowered: Lowered, program: Program, moves: Transfers) -> State:
    """What the kernel changes, before anything has run."""
    lanes = len(lowered.lanes)
    cells, messages = len(lowered.actions) * program.turns, len(lowered.passings) * program.turns
    queued = messages * (program.rendezvous or bool((moves.queue[:, 1:] >= 0).any()))
    return State(
        turn=np.zeros(lanes, np.int64),
        action=program.first.copy(),
        clock=np.zeros(lanes),
        waiting=np.full(lanes, -1, np.int64),
        reached=np.zeros(lanes, np.bool_),
        free=np.zeros(moves.num_queues),
        start=np.full(cells, UNKNOWN),
        rank=np.zeros(cells, np.int32),
        posted=np.full(messages * program.rendezvous, UNKNOWN),
        sent=np.full(messages, UNKNOWN),
        linked=np.full(messages * links_are_shared(moves), UNKNOWN),
        arrival=np.full(messages, UNKNOWN),
        times=np.empty(queued + 1),
        codes=np.empty(queued + 1, np.int64),
        ready=np.zeros(lanes, np.int64),
    )


def tables(lowered: Lowered) -> dict[str, Whole]:
    """Who waits for what and who makes it, as whole numbers."""
    passings = lowered.passings
    actions = len(lowered.actions)
    users = np.array([-1 if passing.user is None else passing.user for passing in passings], np.int64)
    sources = np.array([passing.source for passing in passings], np.int64)
    by_user = np.argsort(users, kind="stable")
    positions = np.arange(actions + 1)
    lane_of = np.array([*lowered.lane_of, -1], np.int64)
    return {
        "need_at": np.searchsorted(users[by_user], positions),
        "needs": by_user,
        "make_at": np.searchsorted(sources, positions),
        "back": np.array([passing.back for passing in passings], np.int64),
        "source": sources,
        "user": lane_of[users],
        "sender": np.array([-1 if p.receiver is None else sender_of(lowered, p) for p in passings], np.int64),
    }
