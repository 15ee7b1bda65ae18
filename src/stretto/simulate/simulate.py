"""Time on paper: when each action would start and end, given what each one costs."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from stretto.errors import ScheduleError
from stretto.schedule import Action, Rules, Schedule
from stretto.schedule.check import explain
from stretto.schedule.span import Span

Durations = Callable[[Action], float]


@dataclass(frozen=True)
class Timeline:
    """What a simulation gives: spans in the order they were worked out, and what can be read off them."""

    schedule: Schedule
    spans: tuple[Span, ...]
    peak_graphs: tuple[int, ...]  # the most forwards that each stage held at once for their backward
    peak_inputs: tuple[int, ...]  # the most inputs that each stage held at once for their recompute

    @cached_property
    def makespan(self) -> float:
        """From the start to the end of the last action."""
        return max((span.end for span in self.spans), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each worker computes."""
        busy = [0.0] * self.schedule.num_workers
        for span in self.spans:
            busy[span.worker] += span.end - span.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Idle time as a share of all workers' time."""
        total = self.makespan * self.schedule.num_workers
        return 1 - sum(self.busy) / total if total else 0.0


def unit_costs(action: Action) -> float:
    """F, C, I and W take 1, B both halves of the backward, an update nothing."""
    return {"F": 1, "C": 1, "B": 2, "I": 1, "W": 1, "U": 0}[action.kind]


def simulate(schedule: Schedule, rules: Rules, turns: int, durations: Durations = unit_costs) -> Timeline:
    """Let `turns` turns enter and the pipeline drain. Communication is free; times are in the unit of `durations`.

    Raises ScheduleError at a deadlock, with who waits for what.
    """
    queues = [deque(schedule.unroll(worker, turns)) for worker in range(schedule.num_workers)]
    when = {edge: 0.0 for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    clocks = [0.0] * schedule.num_workers
    held, peak = ({value: [0] * schedule.num_stages for value in ("graph", "input")} for _ in range(2))
    spans: list[Span] = []
    progress = True
    while progress:
        progress = False
        for worker, queue in enumerate(queues):
            while queue and all(edge in when for edge in rules.needs(queue[0])):
                action, progress = queue.popleft(), True
                start = max([clocks[worker], *(when[edge] for edge in rules.needs(action))])
                clocks[worker] = end = start + durations(action)
                spans.append(Span(worker, action, start, end))
                when.update(dict.fromkeys(rules.makes(action), end))
                stage = action.stage
                for value, many in held.items():
                    many[stage] += any(edge.value == value for edge in rules.makes(action))
                    peak[value][stage] = max(peak[value][stage], many[stage])
                    many[stage] -= any(edge.value == value for edge in rules.frees(action))
    if any(queues):
        raise ScheduleError(f"deadlock: {explain(queues, rules, set(when))}")
    return Timeline(schedule, tuple(spans), tuple(peak["graph"]), tuple(peak["input"]))
