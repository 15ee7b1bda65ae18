"""Simulates a lowered schedule: from arrays of durations and transfers to arrays of times."""

import importlib.util
import math
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.schedule.lower import Lowered, Passing
from stretto.simulate import kernel
from stretto.simulate.kernel import UNKNOWN, State, TurnProgram
from stretto.simulate.network import RENDEZVOUS, Transport

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Transfers:
    """The times of each value that passes between lanes, and the queues that it joins.

    Arrays have a row for each value of `Lowered.passings`. A queue is a send lane, a shared link or a receive lane.
    """

    hold: Floats  # how long it occupies lanes and links
    gap: Floats  # how long no other message can begin there: `hold` or more
    latency: Floats  # (values, 1), or (values, turns) where some messages are late
    queue: Whole  # (values, 3): the numbers of its queues at send lane, link, receive lane; -1 where it never waits
    num_queues: int
    rendezvous: bool = False  # whether a send begins only once its receiver waits


@dataclass(frozen=True)
class SimulatedTimes:
    """The times of all actions and messages: a row for each action or value, a column for each minibatch.

    The time of a value that was never sent, or never arrived, is below 0.
    """

    turns: int
    durations: Floats  # (actions, turns), or (actions, 1) where all minibatches are alike
    starts: Floats
    ranks: Whole  # each action's number in the order of simulation; an action comes after all that it waits for
    sent: Floats  # (values, turns): when the send lane began to send a value
    linked: Floats  # when a shared link began to carry it; no rows without shared links
    arrivals: Floats  # when its receiver had it
    done: int  # the number of actions that ran

    @property
    def ends(self) -> Floats:
        return self.starts + self.durations


def transfers(lowered: Lowered, transport: Transport, turns: int = 1) -> Transfers:
    """The times and queues of every value; of late messages for each of `turns` minibatches.

    A queue is left out where no message ever waits: where its messages take no time, or where all come from one send
    lane, in order, which already keeps them as far apart as this queue would.
    """
    size = len(lowered.passings)
    hold, gap, latency = np.zeros(size), np.zeros(size), np.zeros((size, 1))
    late_share, late_time = np.zeros(size), np.zeros(size)
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
        late_share[value], late_time[value] = link.late_share, link.late_time
        gap[value] = num_bytes * max(link.seconds_per_byte, link.gap)
        for column, key in enumerate((("send", pair[0]), ("link", link.shared), ("receive", pair[1]))):
            if key[1] != "":
                queue[value, column] = numbers.setdefault(key, len(numbers))
                senders.setdefault(int(queue[value, column]), set()).add(pair[0])
    if (late_share * late_time).any():  # a row of draws for each minibatch: more of them leave the others as they are
        draws = np.random.default_rng(transport.network.seed).random((turns, size)).T
        latency = latency + np.where(draws < late_share[:, None], late_time[:, None], 0.0)
    for number in range(len(numbers)):
        entries = queue == number
        one_sender = len(senders[number]) == 1 and not entries[:, 0].any() and latency.shape[1] == 1
        if one_sender or not gap[entries.any(axis=1)].any():
            queue[entries] = -1
    return Transfers(hold, gap, latency, queue, len(numbers), transport.sends == RENDEZVOUS)


def rounded(turns: int, durations: Floats, transfer_times: Transfers) -> tuple[Floats, Transfers]:
    """Times rounded to multiples of a power of two, so that their sums over `turns` turns are exact.

    Times that are such multiples already, like integers, do not change; others change by less than 1e-8 of a turn.
    """
    longest = turns * (durations.sum() + transfer_times.gap.sum() + transfer_times.latency.sum())
    unit = 2.0 ** (math.ceil(math.log2(longest)) - 52) if longest else 1.0

    def multiples(times: Floats) -> Floats:
        return np.round(times / unit) * unit

    exact = replace(
        transfer_times,
        hold=multiples(transfer_times.hold),
        gap=multiples(transfer_times.gap),
        latency=multiples(transfer_times.latency),
    )
    return multiples(durations), exact


def sender_of(lowered: Lowered, passing: Passing) -> int:
    """The worker that makes a value."""
    return lowered.lanes[lowered.lane_of[passing.source]].worker


def execute(lowered: Lowered, turns: int, durations: Floats, transfer_times: Transfers) -> SimulatedTimes:
    """The times of `turns` minibatches, until the pipeline has drained; `durations` as in SimulatedTimes."""
    actions, values = len(lowered.actions), len(lowered.passings)
    program = program_of(lowered, turns, durations, transfer_times)
    state, done = run_kernel(program, first_state(lowered, program, transfer_times), actions * turns)

    def rows(flat: Any, num_rows: int) -> Any:
        return np.asarray(flat).reshape(num_rows, turns)

    return SimulatedTimes(
        turns,
        durations,
        starts=rows(state.start, actions),
        ranks=rows(state.rank, actions),
        sent=rows(state.sent, values),
        linked=rows(state.linked, values * links_are_shared(transfer_times)),
        arrivals=rows(state.arrival, values),
        done=done,
    )


def links_are_shared(transfer_times: Transfers) -> bool:
    """Whether any message may wait for a link that several pairs of workers share."""
    return bool((transfer_times.queue[:, 1] >= 0).any())


def program_of(lowered: Lowered, turns: int, durations: Floats, transfer_times: Transfers) -> TurnProgram:
    """The kernel's constant input."""
    late = np.array(lowered.late, np.int64)
    return TurnProgram(
        turns=turns,
        span=turns + int(late.max()) if turns else 0,
        size=max(1, len(lowered.passings)),
        rendezvous=transfer_times.rendezvous,
        first=np.array([lane.first for lane in lowered.lanes], np.int64),
        last=np.array([lane.last for lane in lowered.lanes], np.int64),
        late=late,
        row_stride=durations.shape[1],
        minibatch_stride=int(durations.shape[1] > 1),
        duration=np.ascontiguousarray(durations).ravel(),
        **tables(lowered),
        hold=transfer_times.hold,
        gap=transfer_times.gap,
        latency_row=transfer_times.latency.shape[1],
        latency_column=int(transfer_times.latency.shape[1] > 1),
        latency=np.ascontiguousarray(transfer_times.latency).ravel(),
        queue=transfer_times.queue.ravel(),
    )


def first_state(lowered: Lowered, program: TurnProgram, transfer_times: Transfers) -> State:
    """The state that the kernel changes, as it is before the first action."""
    lanes = len(lowered.lanes)
    cells, messages = len(lowered.actions) * program.turns, len(lowered.passings) * program.turns
    queued = messages * (program.rendezvous or bool((transfer_times.queue[:, 1:] >= 0).any()))
    return State(
        turn=np.zeros(lanes, np.int64),
        action=program.first.copy(),
        clock=np.zeros(lanes),
        waiting=np.full(lanes, -1, np.int64),
        reached=np.zeros(lanes, np.bool_),
        free=np.zeros(transfer_times.num_queues),
        start=np.full(cells, UNKNOWN),
        rank=np.zeros(cells, np.int32),
        posted=np.full(messages * program.rendezvous, UNKNOWN),
        sent=np.full(messages, UNKNOWN),
        linked=np.full(messages * links_are_shared(transfer_times), UNKNOWN),
        arrival=np.full(messages, UNKNOWN),
        times=np.empty(queued + 1),
        codes=np.empty(queued + 1, np.int64),
        ready=np.zeros(lanes, np.int64),
    )


def tables(lowered: Lowered) -> dict[str, Whole]:
    """The kernel's arrays of dependences: the values that each action needs and makes."""
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


MIN_ACTIONS = 100_000  # from which on a compiled run saves more than the half second that loading it takes
INNER = ("code_of", "push", "pop")  # functions that `run` calls


def run_kernel(program: TurnProgram, state: State, actions: int) -> tuple[State, int]:
    """Run the kernel: the state with all times, and how many of `actions` actions ran; fewer than all is a deadlock."""
    fast = compiled() if actions >= MIN_ACTIONS else None
    if fast is not None:
        try:
            return state, int(fast.run(program, state))
        except AttributeError:  # numba reads what an older kernel left, names and all, before it asks how old that is
            forget_compiled(fast)
            return state, int(fast.run(program, state))
    lists = State(*map(as_list, state))  # loops over lists take a third of the time of loops over arrays
    return lists, kernel.run(TurnProgram(*map(as_list, program)), lists)


def as_list(value: Any) -> Any:
    """An array as a list; a number unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def forget_compiled(module: ModuleType) -> None:
    """Remove what numba keeps of the kernel on this machine; the next call compiles."""
    import numba

    for index in Path(module.run.stats.cache_path).glob("kernel.run-*.nbi"):
        index.unlink(missing_ok=True)
    module.run = numba.njit(cache=True)(module.run.py_func)  # type: ignore[attr-defined]


@cache
def compiled() -> ModuleType | None:
    """A second copy of the kernel's module, with functions compiled by numba; None without numba.

    The first call on a machine compiles; numba keeps the compiled code beside the source or in the user's cache.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    name = f"{kernel.__name__}_compiled"
    spec = importlib.util.spec_from_file_location(name, kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for function in INNER:
        setattr(module, function, numba.njit(getattr(module, function)))
    module.run = numba.njit(cache=True)(module.run)  # type: ignore[attr-defined]
    return module
