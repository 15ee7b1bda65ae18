"""What plans cost, read off their steps: messages, elements, and time on paper."""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.collectives.step import ADD, SEND, Plan, Step
from stretto.errors import ScheduleError
from stretto.options.checks import number, of_kind, sequence, whole


class Traffic(NamedTuple):
    """What a process sends."""

    messages: int
    elements: int


def traffic(plan: Plan) -> Traffic:
    """How many messages a plan sends, and how many elements in all of them."""
    check_plan(plan)
    sends = [step for step in plan if step.kind == SEND]
    return Traffic(len(sends), sum(step.length for step in sends))


def check_plan(plan: Plan, size: int = sys.maxsize) -> None:
    """Refuse what is no plan, or not one among so many processes."""
    sequence("plan", plan, "what stretto.collectives.plan(...) returned")
    for step in plan:
        of_kind("a step of the plan", step, Step, "a stretto.collectives.Step")
        whole("a step's peer", step.peer, 0, size - 1)


@dataclass
class Posted:
    """A send that has been handed over, at a time; and when it was taken."""

    step: Step
    since: float
    taken: float | None = None


@dataclass
class Process:
    """One process on its way through its plan."""

    rest: deque[Step]
    clock: float = 0  # when it came to the step it stands at
    port: float = 0  # when the last of its messages had left
    sent: list[Posted] = field(default_factory=list)
    arrival: float | None = None  # of the message of the step it stands at

    def settled(self, step: Step) -> float | None:
        """Since when no message is under way that holds elements of a step; None if there is one."""
        pending = [each for each in self.sent if each.step.overlaps(step)]
        times = [each.taken for each in pending if each.taken is not None]
        return max([self.clock, *times]) if len(times) == len(pending) else None


def price(plans: Sequence[Plan], latency: float = 1, per_element: float = 0, reduction: float = 0) -> float:
    """Time until all are done: a message of n takes `latency` + n `per_element`, adding n elements n `reduction`.

    Each process has one port out and one in; a message leaves when both ends have come to it, and sends of a process
    leave in their order. That is the strictest way in which messages can travel: plans that end here end with any.
    With (1, 0, 0) the result is the number of messages one after the other, with (0, 1, 0) that of elements. Raises
    ScheduleError for plans that deadlock, or that leave messages over.
    """
    sequence("plans", plans, "what stretto.collectives.plans(...) returned: a plan for each process")
    for plan in plans:
        check_plan(plan, len(plans))
    for name, value in (("latency", latency), ("per_element", per_element), ("reduction", reduction)):
        number(name, value, 0)
    processes = [Process(deque(plan)) for plan in plans]
    moved = True
    while moved:
        moved = False
        for rank in range(len(processes)):
            while advance(processes, rank, latency, per_element, reduction):
                moved = True
    stuck = [f"process {rank} waits at {p.rest[0]}" for rank, p in enumerate(processes) if p.rest]
    left = [f"nobody takes {e.step} of process {r}" for r, p in enumerate(processes) for e in p.sent if e.taken is None]
    if stuck or left:
        raise ScheduleError("; ".join([*stuck, *left]))
    return max((max(process.clock, process.port) for process in processes), default=0)


def advance(processes: list[Process], rank: int, latency: float, per_element: float, reduction: float) -> bool:
    """Take one process one step further, if it can go."""
    me = processes[rank]
    if not me.rest:
        return False
    step = me.rest[0]
    if step.kind == SEND:
        me.sent.append(Posted(me.rest.popleft(), me.clock))
        return True
    if me.arrival is None:
        head = next((each for each in processes[step.peer].sent if each.taken is None), None)
        if head is None or head.step.peer != rank:
            return False
        if head.step[2:] != step[2:]:
            raise ScheduleError(f"process {step.peer} sends {head.step}, process {rank} expects {step}")
        source = processes[step.peer]
        me.arrival = max(me.clock, head.since, source.port) + latency + step.length * per_element
        source.port = head.taken = me.arrival
        return True
    me.clock = me.arrival
    if step.kind == ADD:
        settled = me.settled(step)
        if settled is None:
            return False
        me.clock = max(me.arrival, settled) + step.length * reduction
    me.arrival = None
    me.rest.popleft()
    return True
