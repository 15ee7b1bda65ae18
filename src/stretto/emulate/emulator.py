"""Runs every worker of a schedule on one device, in one process, with the exact numerics of the delays."""

from collections import deque
from collections.abc import Callable, Mapping

from stretto.errors import ScheduleError
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.dataflow import Flow
from stretto.schedule.validity import explain
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import Stage


class Emulator(Interpreter):
    """Each worker has a queue of actions; making a value wakes the worker whose next action waits for it."""

    def __init__(
        self, schedule: Schedule, rules: Rules, stages: Mapping[int, Stage], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, stages, delays)
        self.queues: list[deque[tuple[Action, Flow]]] = [deque() for _ in schedule.body]
        self._waiting: dict[Edge, int] = {}
        self.may_run: Callable[[Action], bool] | None = None  # a further condition for running an action

    def restart(self, n: int) -> None:
        """Drop all actions and values in flight; turn n comes next."""
        self._waiting.clear()
        for queue in self.queues:
            queue.clear()
        super().restart(n)

    def _finish(self, until: int) -> None:
        if any(self.queues):
            left = [deque(action for action, _ in queue) for queue in self.queues]
            raise ScheduleError(f"deadlock: {explain(left, self.rules, set(self.values))}")

    def _issue(self, n: int, until: int | None) -> None:
        self.enqueue(n, until)
        self.pump()

    def enqueue(self, n: int, until: int | None) -> None:
        """Append turn n's actions to the workers' queues, without those of micro-batches from `until` on."""
        for worker, queue in enumerate(self.queues):
            for action in self.schedule.turn(worker, n, until, self._since):
                queue.append((action, self.rules.flow(action, self._since)))

    def pump(self) -> bool:
        """Run actions until every worker waits or has none left. Returns whether any action ran."""
        ready = deque(range(len(self.queues)))
        before = sum(map(len, self.queues))
        while ready:
            self._advance(ready.popleft(), ready)
        return before != sum(map(len, self.queues))

    def _advance(self, worker: int, ready: deque[int]) -> None:
        queue = self.queues[worker]
        while queue:
            action, flow = queue[0]
            for edge in flow.needs:
                if edge not in self.values:
                    self._waiting[edge] = worker
                    return
            if self.may_run is not None and not self.may_run(action):
                return
            queue.popleft()
            self._run(action, flow)
            for edge in flow.makes:
                waiter = self._waiting.pop(edge, None)
                if waiter is not None:
                    ready.append(waiter)
