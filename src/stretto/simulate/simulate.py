"""Time on paper: when each action would start and end, given what each one costs."""

from collections import deque
from collections.abc import Callable, Sequence
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
    peak_activations: tuple[int, ...]  # graphs and inputs that each worker held at once, all its stages together
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
        return max(0.0, (total - sum(self.busy)) / total) if total else 0.0


def unit_costs(action: Action) -> float:
    """F, C, I and W take 1, B both halves of the backward, R and an update nothing."""
    return {"F": 1, "C": 1, "B": 2, "I": 1, "W": 1, "A": 0, "R": 0, "U": 0, "M": 0}[action.kind]


def simulate(
    schedule: Schedule, rules: Rules, turns: int, durations: Durations = unit_costs, *, latency: float = 0
) -> Timeline:
    """Let `turns` turns enter and the pipeline drain. Times are in the unit of `durations`.

    A value is there for its own worker at once, for another one `latency` later; sending keeps nobody busy, and what
    the loader gives is there from the start.
    Raises ScheduleError at a deadlock, with who waits for what.
    """
    queues = [deque(schedule.unroll(worker, turns)) for worker in range(schedule.num_workers)]
    when = {edge: 0.0 for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    clocks = [0.0] * schedule.num_workers
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
                for edge in rules.makes(action):
                    when[edge] = end + latency * (schedule.worker_of.get(edge.stage, worker) != worker)
    if any(queues):
        raise ScheduleError(f"deadlock: {explain(queues, rules, set(when))}")
    by_stage = [span.action.stage for span in spans]
    graphs, inputs = (most_held(spans, rules, by_stage, schedule.num_stages, {value}) for value in ("graph", "input"))
    by_worker = most_held(spans, rules, [span.worker for span in spans], schedule.num_workers, {"graph", "input"})
    return Timeline(schedule, tuple(spans), graphs, by_worker, inputs)


def most_held(
    spans: Sequence[Span], rules: Rules, places: Sequence[int], size: int, values: set[str]
) -> tuple[int, ...]:
    """The most of such values held at once in each of `size` places, given where each span belongs."""
    held, peak = [0] * size, [0] * size
    for span, place in zip(spans, places, strict=True):
        held[place] += sum(edge.value in values for edge in rules.makes(span.action))
        held[place] -= sum(edge.value in values for edge in rules.frees(span.action))
        peak[place] = max(peak[place], held[place])
    return tuple(peak)
