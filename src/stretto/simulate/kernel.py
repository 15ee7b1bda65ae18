"""The inner loop of the simulator, on integers and arrays only: run by Python, or compiled by numba.

An action is simulated as soon as the times of all values that it waits for are known, perhaps ahead of other workers'
time: nothing elsewhere can change when it starts, because every lane keeps the schedule's order. Only where messages of
several senders meet (a receive lane, a shared link) does it matter which comes first. There they queue, first come,
first served: messages under way to such a place wait in a heap until everything earlier is known. Messages that come at
the same time are served in the order of their senders' numbers, then of their sender's schedule.
"""

from typing import Any, NamedTuple

UNKNOWN = -1.0  # a time that is not known yet; times are 0 or more
SEND, LINK, RECEIVE = 0, 1, 2  # the places where a message may wait, in this order


class TurnProgram(NamedTuple):
    """The constant input: one turn, and the times of its actions. `Any` is an array, or a list without numba.

    numba's files of compiled code name this class and `State`: under other names older files would fail to load.
    """

    turns: int
    span: int  # turns until everything that entered is finished
    size: int  # values that pass between lanes in a turn
    rendezvous: bool
    first: Any  # of each lane: its first action
    last: Any  # of each lane: the position after its last action
    late: Any  # of each action: turns after its minibatch entered
    row_stride: int  # the duration of action a for minibatch g stands at a * row_stride + g * minibatch_stride
    minibatch_stride: int
    duration: Any
    need_at: Any  # of each action: where its values stand in `needs`; one more at the end
    needs: Any
    make_at: Any  # of each action: the first value that it makes; one more at the end
    back: Any  # of each value: minibatches from its user's to its source's
    source: Any  # of each value: the action that makes it
    user: Any  # of each value: the lane of the action that waits for it, or -1
    sender: Any  # of each value: the worker that sends it, or -1 where it stays
    hold: Any  # of each value: how long it takes on lanes and links
    gap: Any  # of each value: how long no other can begin there
    latency_row: int  # the latency of value v for minibatch g stands at v * latency_row + g * latency_column
    latency_column: int
    latency: Any
    queue: Any  # of each value three: the number of its queue at the send lane, link, receive lane, or -1


class State(NamedTuple):
    """The changing state: where each lane is, the times known so far, and the messages that queue."""

    turn: Any  # of each lane: the turn that it is in
    action: Any  # of each lane: its next action
    clock: Any  # of each lane: when it became free
    waiting: Any  # of each lane: the value it waits for, or -1
    reached: Any  # of each lane: whether senders know that it has reached its next action (rendezvous only)
    free: Any  # of each queue: when its lane or link becomes free
    start: Any  # of action a for minibatch g at a * turns + g
    rank: Any  # the same: how many actions were simulated before
    posted: Any  # of value v of minibatch g at v * turns + g: when its receiver began to wait (rendezvous only)
    sent: Any  # the same: when its send lane began to send it; before that, when it was made
    linked: Any  # the same: when a shared link began to carry it
    arrival: Any  # the same: when its receiver had it
    times: Any  # a heap of messages: when they reach a place,
    codes: Any  # and which messages and places these are: see `code_of`
    ready: Any  # a stack of lanes that may go on


def run(program: TurnProgram, state: State) -> int:
    """Compute all times, in `state`; the number of actions that ran.

    This is one function, because a call with all these arrays takes longer than an action.
    """
    turns, span, size, rendezvous, firsts, lasts, lates, row_stride, stride, durations = program[:10]
    need_at, needs, make_at, backs, sources, users, senders, holds, gaps = program[10:19]
    latency_row, latency_column, latencies, queues = program[19:]
    turn_of, action_of, clock_of, waiting, reached, free, starts, ranks, posted, sent, linked, arrivals = state[:12]
    times, codes, ready = state[12:]
    pending, waking, done = 0, len(firsts), 0
    for lane in range(waking):
        ready[lane] = lane
    lane = -1
    while True:
        if lane < 0 and waking > 0:  # a lane that may go on
            waking -= 1
            lane = ready[waking]
            turn, action, clock = turn_of[lane], action_of[lane], clock_of[lane]
            first, last = firsts[lane], lasts[lane]
        if lane >= 0:  # its next action, until one has to wait
            group = turn - lates[action]
            while (group < 0 or group >= turns) and turn < span:
                action += 1
                if action == last:
                    action = first
                    turn += 1
                group = turn - lates[action]
            blocked = turn >= span
            start = clock
            if not blocked:
                if rendezvous and not reached[lane]:  # others may now send what it waits for
                    reached[lane] = True
                    for i in range(need_at[action], need_at[action + 1]):
                        value = needs[i]
                        of_group = group + backs[value]
                        if senders[value] >= 0 and 0 <= of_group < turns:
                            at = value * turns + of_group
                            posted[at] = clock
                            if sent[at] != UNKNOWN:
                                code = code_of(
                                    senders[value], of_group + lates[sources[value]], value, SEND, span, size
                                )
                                pending = push(times, codes, pending, max(clock, sent[at]), code)
                for i in range(need_at[action], need_at[action + 1]):
                    of_group = group + backs[needs[i]]
                    if of_group >= 0:  # else it would have been of a minibatch before the first
                        at = needs[i] * turns + of_group
                        there = arrivals[at] if of_group < turns else UNKNOWN
                        if there == UNKNOWN:
                            waiting[lane] = at
                            blocked = True
                            break
                        start = max(start, there)
            if blocked:
                turn_of[lane], action_of[lane], clock_of[lane] = turn, action, clock
                lane = -1
                continue
            at = action * turns + group
            starts[at] = start
            ranks[at] = done
            done += 1
            time = clock = start + durations[action * row_stride + group * stride]
            reached[lane] = False
            value, until, place = make_at[action], make_at[action + 1], SEND
            action += 1
            if action == last:
                action = first
                turn += 1
        elif pending > 0:  # the message that is the first to come anywhere
            time, code = times[0], codes[0]
            pending = pop(times, codes, pending)
            place, value = code % 3, code // 3 % size
            group = code // 3 // size % span - lates[sources[value]]
            until = value + 1
        else:
            return done
        made = lane >= 0
        comes = time
        while value < until:  # each value that was made, or the message that came to a place, goes on from there
            at = value * turns + group
            hold = holds[value]
            time = comes
            going = True
            if senders[value] < 0:
                place = RECEIVE
            elif made:
                place = SEND
                if rendezvous:
                    sent[at] = time
                    going = False
                    if posted[at] != UNKNOWN:
                        code = code_of(senders[value], group + lates[sources[value]], value, SEND, span, size)
                        pending = push(times, codes, pending, max(time, posted[at]), code)
            if going:
                queue = queues[3 * value + place]
                if queue >= 0:
                    time = max(time, free[queue])
                    free[queue] = time + gaps[value]
                following = RECEIVE
                if place == SEND:
                    sent[at] = time
                    if queues[3 * value + LINK] >= 0:
                        following = LINK
                elif place == LINK:
                    linked[at] = time
                if place != RECEIVE and following == RECEIVE:
                    time += latencies[value * latency_row + group * latency_column]
                if place != following and queues[3 * value + following] >= 0:
                    code = code_of(senders[value], group + lates[sources[value]], value, following, span, size)
                    pending = push(times, codes, pending, time, code)
                else:  # it arrives
                    arrivals[at] = time + hold
                    user = users[value]
                    if user >= 0 and waiting[user] == at:
                        waiting[user] = -1
                        ready[waking] = user
                        waking += 1
            value += 1


def code_of(sender: int, turn: int, value: int, place: int, span: int, size: int) -> int:
    """A message and its place as one number: of messages that come at the same time, the least is served first."""
    return 3 * ((sender * span + turn) * size + value) + place


def push(times: Any, codes: Any, size: int, time: float, code: int) -> int:
    """Put a message into the heap; the heap's new size."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if times[above] < time or (times[above] == time and codes[above] < code):
            break
        times[at], codes[at] = times[above], codes[above]
        at = above
    times[at], codes[at] = time, code
    return size + 1


def pop(times: Any, codes: Any, size: int) -> int:
    """Take the earliest message out of the heap; the heap's new size.

    The gap at the top moves down to a leaf, and the last message moves up from there: it belongs far down more often
    than not. Which of two children is earlier is unpredictable, so this is computed without a branch.
    """
    size -= 1
    time, code = times[size], codes[size]
    at, below = 0, 1
    while below < size:
        other = min(below + 1, size - 1)
        below += int((times[other] < times[below]) | ((times[other] == times[below]) & (codes[other] < codes[below])))
        times[at], codes[at] = times[below], codes[below]
        at, below = below, 2 * below + 1
    push(times, codes, at, time, code)
    return size
