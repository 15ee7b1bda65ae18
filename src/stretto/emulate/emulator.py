"""Every worker on one device, in one process: exact numerics, delays included."""

from collections import deque
from collections.abc import Mapping

from stretto.errors import ScheduleError
from stretto.interpreter import Interpreter
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.check import explain
from stretto.stage import Stage


class Emulator(Interpreter):
    """Each worker has a queue; an action that waits for a value is woken when that value is made."""

    def __init__(
        self, schedule: Schedule, rules: Rules, stages: Mapping[int, Stage], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, stages, delays)
        self._queues: list[deque[tuple[Action, tuple[Edge, ...]]]] = [deque() for _ in schedule.body]  # with needs
        self._waiting: dict[Edge, int] = {}

    def restart(self, n: int) -> None:
        """Turn n comes next; whatever was in flight is dropped."""
        self._waiting.clear()
        for queue in self._queues:
            queue.clear()
        super().restart(n)

    def _finish(self, until: int) -> None:
        if any(self._queues):
            left = [deque(action for action, _ in queue) for queue in self._queues]
            raise ScheduleError(f"deadlock: {explain(left, self.rules, set(self.values))}")

    def _issue(self, n: int, until: int | None) -> None:
        ready = deque(range(len(self._queues)))
        for worker, queue in enumerate(self._queues):
            for action in self.schedule.turn(worker, n, until, self._since):
                queue.append((action, self._needs(action)))
        while ready:
            self._advance(ready.popleft(), ready)

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
