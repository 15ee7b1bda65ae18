"""From a lowered schedule and its side tables to the times of everything: arrays in, arrays out."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.schedule.lower import Lowered, Passing
from stretto.simulate import compiled
from stretto.simulate.kernel import UNKNOWN, Program, State
from stretto.simulate.network import Network, Sizes

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
BUFFERED, RENDEZVOUS = "buffered", "rendezvous"


@dataclass(frozen=True)
class Wires:
    """What each passing value takes on its way, and what it may have to queue for there."""

    hold: Floats
    gap: Floats  # how long nobody else can begin there: no less
    latency: Floats
    place: Whole  # (values, 3): send lane, link, receive lane; -1 where nobody can be in the way
    places: int


@dataclass(frozen=True)
class Outcome:
    """When everything was: a row an action or a value, a column a minibatch.

    Where a value was never sent, or never came, its time is below 0.
    """

    turns: int
    durations: Floats  # (actions, turns), or (actions, 1) where all minibatches are alike
    starts: Floats
    ranks: Whole  # in which order actions were worked out: no action before one that it waits for
    sent: Floats  # (values, turns): when the send lane began with a value
    linked: Floats  # when a shared link began with it; no rows without shared links
    arrivals: Floats  # when it was there
    done: int  # actions

    @property
    def ends(self) -> Floats:
        """When each action ended."""
        return self.starts + self.durations


def wires(lowered: Lowered, network: Network, sizes: Sizes) -> Wires:
    """Look up the way of every value.

    A place where nobody can be in the way is left out: all that pass there take no time; or they come from one lane in
    the order in which they arrive, and were as far apart there as they are here.
    """
    size = len(lowered.passings)
    hold, gap, latency = np.zeros(size), np.zeros(size), np.zeros(size)
    names: dict[tuple[str, object], int] = {}
    users: dict[int, set[int]] = {}
    place = np.full((size, 3), -1, np.int64)
    for value, passing in enumerate(lowered.passings):
        if passing.receiver is None or passing.edge is None:
            continue
        pair = (sender_of(lowered, passing), passing.receiver)
        link = network[pair]
        num_bytes = sizes(passing.edge)
        hold[value], latency[value] = num_bytes * link.seconds_per_byte, link.latency
        gap[value] = num_bytes * max(link.seconds_per_byte, link.gap)
        there = [("send", pair[0]), ("link", link.shared), ("receive", pair[1])]
        for column, key in enumerate(there):
            if key[1] != "":
                place[value, column] = names.setdefault(key, len(names))
                users.setdefault(int(place[value, column]), set()).add(pair[0])
    for number in range(len(names)):
        mine = place == number
        alone = len(users[number]) == 1 and not mine[:, 0].any()
        if alone or not gap[mine.any(axis=1)].any():
            place[mine] = -1
    return Wires(hold, gap, latency, place, len(names))


def rounded(turns: int, durations: Floats, wires: Wires) -> tuple[Floats, Wires]:
    """Times as multiples of a power of two so small that none of their sums over so many turns is rounded.

    Times that are multiples already, as whole numbers are, stay as they are; others change by less than 1e-8 of a turn.
    """
    longest = turns * (durations.sum() + wires.gap.sum() + wires.latency.sum())
    unit = 2.0 ** (math.ceil(math.log2(longest)) - 52) if longest else 1.0

    def near(times: Floats) -> Floats:
        return np.round(times / unit) * unit

    return near(durations), replace(wires, hold=near(wires.hold), gap=near(wires.gap), latency=near(wires.latency))


def sender_of(lowered: Lowered, passing: Passing) -> int:
    """The worker that makes a value."""
    return lowered.lanes[lowered.lane_of[passing.source]].worker


def execute(lowered: Lowered, turns: int, durations: Floats, wires: Wires, *, sends: str = BUFFERED) -> Outcome:
    """Let `turns` minibatches enter and the pipeline drain. `durations` is (actions, turns), or (actions, 1)."""
    size, actions = len(lowered.passings), len(lowered.actions)
    late = np.array(lowered.late, np.int64)
    each = int(durations.shape[1] > 1)
    rendezvous = sends == RENDEZVOUS
    messages = size * turns
    program = Program(
        turns=turns,
        span=turns + int(late.max()) if turns else 0,
        size=max(1, size),
        rendezvous=rendezvous,
        first=np.array([lane.first for lane in lowered.lanes], np.int64),
        last=np.array([lane.last for lane in lowered.lanes], np.int64),
        late=late,
        step=durations.shape[1],
        each=each,
        duration=np.ascontiguousarray(durations).ravel(),
        **tables(lowered),
        hold=wires.hold,
        gap=wires.gap,
        latency=wires.latency,
        place=wires.place.ravel(),
    )
    linked = bool((wires.place[:, 1] >= 0).any())
    lanes, queued = len(lowered.lanes), rendezvous or bool((wires.place[:, 1:] >= 0).any())
    state = State(
        turn=np.zeros(lanes, np.int64),
        action=program.first.copy(),
        clock=np.zeros(lanes),
        waiting=np.full(lanes, -1, np.int64),
        reached=np.zeros(lanes, np.bool_),
        free=np.zeros(wires.places),
        start=np.full(actions * turns, UNKNOWN),
        rank=np.zeros(actions * turns, np.int32),
        posted=np.full(messages * rendezvous, UNKNOWN),
        sent=np.full(messages, UNKNOWN),
        linked=np.full(messages * linked, UNKNOWN),
        arrival=np.full(messages, UNKNOWN),
        times=np.empty(messages * queued + 1),
        codes=np.empty(messages * queued + 1, np.int64),
        ready=np.zeros(lanes, np.int64),
    )
    state, done = compiled.run(program, state, actions * turns)

    def rows(flat: Any, many: int) -> Any:
        return np.asarray(flat).reshape(many, turns)

    return Outcome(
        turns,
        durations,
        starts=rows(state.start, actions),
        ranks=rows(state.rank, actions),
        sent=rows(state.sent, size),
        linked=rows(state.linked, size * linked),
        arrivals=rows(state.arrival, size),
        done=done,
    )


def tables(lowered: Lowered) -> dict[str, Whole]:
    """Who waits for what and who makes it, as whole numbers."""
    passings = lowered.passings
    actions = len(lowered.actions)
    users = np.array([-1 if each.user is None else each.user for each in passings], np.int64)
    sources = np.array([each.source for each in passings], np.int64)
    by_user = np.argsort(users, kind="stable")
    positions = np.arange(actions + 1)
    lane_of = np.array([*lowered.lane_of, -1], np.int64)
    return {
        "need_at": np.searchsorted(users[by_user], positions),
        "needs": by_user,
        "make_at": np.searchsorted(sources, positions),
        "back": np.array([each.back for each in passings], np.int64),
        "source": sources,
        "user": lane_of[users],
        "sender": np.array([-1 if e.receiver is None else sender_of(lowered, e) for e in passings], np.int64),
    }
