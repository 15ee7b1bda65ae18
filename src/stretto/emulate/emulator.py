"""Every worker on one device, in one process: exact numerics, delays included."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from stretto.errors import ScheduleError
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.check import explain
from stretto.schedule.rules import operands
from stretto.stage import Stage

Watch = Callable[[Action, Mapping[str, Any], Mapping[str, Any]], None]  # an action that has run, its operands, results
Record = Callable[[Action, Mapping[str, Any], int, int], None]  # an action that has run, its operands, when in ns


class Emulator:
    """Runs what a schedule lists, as soon as what it needs is there. It holds no rule of its own.

    Each worker has a queue; an action that waits for a value is woken when that value is made. Numbers depend only on
    each stage's own order, so the order among workers is free. Every forward asks for the version that the
    schedule promises, and every backward asserts the delay.
    """

    def __init__(self, schedule: Schedule, rules: Rules, stages: Sequence[Stage], delays: Delays | None = None) -> None:
        self.schedule = schedule
        self.rules = rules
        self.stages = stages
        self.values: dict[Edge, Any] = {}
        self._queues: list[deque[tuple[Action, tuple[Edge, ...]]]] = [deque() for _ in schedule.body]  # with needs
        self._waiting: dict[Edge, int] = {}
        self._delays = Delays(schedule) if delays is None else delays
        self.watch: Watch | None = None
        self.record: Record | None = None
        self._since = 0  # the first micro-batch after the last drain

    def step(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        """Turn n: micro-batches enter, each given as what the loader makes of it, by value; run all that can run."""
        first = n * self.schedule.per_turn
        for microbatch, load in enumerate(loads, start=first):
            for edge in self.rules.loads(microbatch):
                self.values[edge] = load[edge.value]
        self._issue(n, None)

    def drain(self, n: int) -> None:
        """Finish everything that entered before turn n. Raises ScheduleError if something cannot be finished."""
        until = n * self.schedule.per_turn
        for later in range(n, n + self.schedule.drain):
            self._issue(later, until)
        if any(self._queues):
            left = [deque(action for action, _ in queue) for queue in self._queues]
            raise ScheduleError(f"deadlock: {explain(left, self.rules, set(self.values))}")
        self.begin(n)

    def begin(self, n: int) -> None:
        """Turn n comes next, and nothing is in flight. Weights that nobody waits for any more are dropped."""
        self._since = n * self.schedule.per_turn
        self.values = {edge: value for edge, value in self.values.items() if edge.stage == self.rules.num_stages}
        for tie in self.rules.ties:
            self.stages[tie.user].settle()

    def restart(self, n: int) -> None:
        """Turn n comes next; whatever was in flight is dropped."""
        self._waiting.clear()
        self.values.clear()
        for queue in self._queues:
            queue.clear()
        self.begin(n)

    def _issue(self, n: int, until: int | None) -> None:
        ready = deque(range(len(self._queues)))
        for worker, queue in enumerate(self._queues):
            for action in self.schedule.turn(worker, n, until, self._since):
                queue.append((action, self._needs(action)))
        while ready:
            self._advance(ready.popleft(), ready)

    def _needs(self, action: Action) -> tuple[Edge, ...]:
        needs = self.rules.needs(action)
        if not self.rules.ties:
            return needs
        return tuple(edge for edge in needs if edge.source.microbatch >= self._since)  # what was before is settled

    def _advance(self, worker: int, ready: deque[int]) -> None:
        queue = self._queues[worker]
        while queue:
            action, needs = queue[0]
            for edge in needs:
                if edge not in self.values:
                    self._waiting[edge] = worker
                    return
            queue.popleft()
            for edge in self._run(action, needs):
                waiter = self._waiting.pop(edge, None)
                if waiter is not None:
                    ready.append(waiter)

    def _run(self, action: Action, needs: tuple[Edge, ...]) -> tuple[Edge, ...]:
        stage = self.stages[action.stage]
        given = operands(needs, self.values)
        age, version = action.microbatch - self._since, None
        if action.kind == "F":
            version = self._since // self.schedule.per_turn + self._delays.version(action.stage, age)
        elif action.kind in "BW":
            delay = stage.updates - given["graph"].updates
            wanted = self._delays.at(action.stage, age)
            assert delay == wanted, f"{action}: its weights are {delay} updates old, the schedule promises {wanted}"
            if action.stage in self.rules.recompute:
                delay = stage.updates - given["graph"].recomputed
                wanted = self._delays.recompute_at(action.stage, age)
                assert delay == wanted, f"{action}: recomputed {delay} updates ago, the schedule promises {wanted}"
        start = 0 if self.record is None else perf_counter_ns()
        made = stage.run(action.kind, action.microbatch, given, version)
        if self.record is not None:
            self.record(action, given, start, perf_counter_ns())
        makes = self.rules.makes(action)
        for edge in makes:
            self.values[edge] = made[edge.value]
        if self.watch is not None:
            self.watch(action, given, made)
        for edge in self.rules.frees(action, needs):
            del self.values[edge]
        return makes
