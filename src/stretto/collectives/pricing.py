"""The cost of plans, computed from their steps: messages, elements, and time.

Measured times of all-reduces beside the times that the formulas predict.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from stretto.collectives.algorithms import ALGORITHMS, NESTED, plans
from stretto.collectives.calibration import ITEM, Calibration, predicted
from stretto.collectives.step import ADD, SEND, Plan, Step
from stretto.errors import ScheduleError
from stretto.options.checks import number, of_kind, sequence, whole


class Traffic(NamedTuple):
    """The number of messages that a process sends, and of elements in them."""

    messages: int
    elements: int


def traffic(plan: Plan) -> Traffic:
    """How many messages a plan sends, and how many elements in all of them. Raises UsageError for no plan."""
    check_plan(plan)
    sends = [step for step in plan if step.kind == SEND]
    return Traffic(len(sends), sum(step.length for step in sends))


def check_plan(plan: Plan, size: int = sys.maxsize) -> None:
    """Raise UsageError unless `plan` is a plan among at most `size` processes."""
    sequence("plan", plan, "what stretto.collectives.plan(...) returned")
    for step in plan:
        of_kind("a step of the plan", step, Step, "a stretto.collectives.Step")
        whole("a step's peer", step.peer, 0, size - 1)


@dataclass
class PostedSend:
    """A send that a process has posted: the times at which it was posted, and received (None before)."""

    step: Step
    posted: float
    received: float | None = None


@dataclass
class Process:
    """One process in the midst of its plan; its current step is the first of `rest`."""

    rest: deque[Step]
    clock: float = 0  # when it reached its current step
    port: float = 0  # when its last message so far had left
    sent: list[PostedSend] = field(default_factory=list)
    arrival: float | None = None  # of the message of its current step

    def sends_complete(self, step: Step) -> float | None:
        """The time, at least `clock`, by which all sends of a step's elements are received; None if one is not."""
        sends = [send for send in self.sent if send.step.overlaps(step)]
        times = [send.received for send in sends if send.received is not None]
        return max([self.clock, *times]) if len(times) == len(sends) else None


def price(plans: Sequence[Plan], latency: float = 1, per_element: float = 0, reduction: float = 0) -> float:
    """The time until all processes have finished, in the units of the arguments.

    A message of n elements takes `latency` + n `per_element`, adding n elements takes n `reduction`. Each process has
    one port out and one in. A message leaves when sender and receiver have both reached it, and a process's messages
    leave in order. This is the strictest transport: plans that finish here finish with any. With (1, 0, 0) the result
    is the number of messages on the critical path, with (0, 1, 0) that of elements. Raises ScheduleError for plans that
    deadlock, or that leave messages unreceived, and UsageError for no plans or negative times.
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
    stuck = [f"process {rank} waits at {process.rest[0]}" for rank, process in enumerate(processes) if process.rest]
    unreceived = [
        f"no process receives {send.step} of process {rank}"
        for rank, process in enumerate(processes)
        for send in process.sent
        if send.received is None
    ]
    if stuck or unreceived:
        raise ScheduleError("; ".join([*stuck, *unreceived]))
    return max((max(process.clock, process.port) for process in processes), default=0)


def advance(processes: list[Process], rank: int, latency: float, per_element: float, reduction: float) -> bool:
    """Advance one process by a send, an arrival or the end of a receive; whether that was possible.

    Raises ScheduleError if a message carries other elements than its receiver expects.
    """
    process = processes[rank]
    if not process.rest:
        return False
    step = process.rest[0]
    if step.kind == SEND:
        process.sent.append(PostedSend(process.rest.popleft(), process.clock))
        return True
    if process.arrival is None:
        source = processes[step.peer]
        send = next((send for send in source.sent if send.received is None), None)
        if send is None or send.step.peer != rank:
            return False
        if send.step[2:] != step[2:]:
            raise ScheduleError(f"process {step.peer} sends {send.step}, process {rank} expects {step}")
        process.arrival = max(process.clock, send.posted, source.port) + latency + step.length * per_element
        source.port = send.received = process.arrival
        return True
    process.clock = process.arrival
    if step.kind == ADD:
        complete = process.sends_complete(step)
        if complete is None:
            return False
        process.clock = max(process.arrival, complete) + step.length * reduction
    process.arrival = None
    process.rest.popleft()
    return True


@dataclass(frozen=True)
class ComparedTime:
    """One algorithm at one size. Of torch's own all-reduce only the time is known."""

    bytes: int
    algorithm: str
    seconds: float
    fastest: bool = False
    messages: int | None = None  # of the process that sends the most bytes
    sent: int | None = None  # bytes that this process sends
    predicted: float | None = None  # seconds

    @property
    def ratio(self) -> float | None:
        """Measured seconds over predicted ones; None without a prediction."""
        return self.seconds / self.predicted if self.predicted else None

    def to_json(self) -> dict[str, Any]:
        """The fields and the ratio, as JSON takes them."""
        return asdict(self) | {"ratio": self.ratio}


def compared(calibration: Calibration) -> list[ComparedTime]:
    """A row for each size and algorithm, in the order they were measured."""
    return [
        row_of(calibration, times.bytes, name, seconds, times.fastest == name)
        for times in calibration.measured
        for name, seconds in times.seconds.items()
    ]


def row_of(calibration: Calibration, num_bytes: int, name: str, seconds: float, fastest: bool) -> ComparedTime:
    """The comparison of one algorithm at one size."""
    if name not in ALGORITHMS:
        return ComparedTime(num_bytes, name, seconds)
    per_node = calibration.per_node if name == NESTED else None
    traffics = [traffic(plan) for plan in plans(name, calibration.workers, num_bytes // ITEM, per_node=per_node)]
    busiest = max(traffics, key=lambda process: (process.elements, process.messages))
    time = predicted(name, calibration.link, calibration.workers, num_bytes, per_node)
    return ComparedTime(num_bytes, name, seconds, fastest, busiest.messages, busiest.elements * ITEM, time)
