"""The base of every interpreter that trains: it runs actions on stages and keeps the values between them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any

from torch import Tensor

from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.dataflow import Flow, operands
from stretto.schedule.delay import BACKWARD
from stretto.stage.stage import Stage
from stretto.tracing import Recording

HELD = ("graph", "input")  # what a forward keeps until its backward
OF_STAGE = ("tied-weight", "tied-gradient")  # results with a value of its own for each stage that gets one

Watch = Callable[[Action, Mapping[str, Any], Mapping[str, Any]], None]  # (action, its operands, its results)
Record = Callable[[Action, Mapping[str, Any], int, int], None]  # (action, its operands, start in ns, end in ns)
Profile = Callable[[Action], AbstractContextManager[None]]  # the context in which an action's operations are recorded


class Interpreter(ABC):
    """Runs the actions of a schedule, each once its operands have been made. All rules are in `Rules`.

    Numbers depend only on each stage's own order, so the order among workers is free. Every forward asks for the
    version that the schedule promises, and every backward asserts the delay. `stages` are those of this process, by
    index.
    """

    def __init__(
        self, schedule: Schedule, rules: Rules, stages: Mapping[int, Stage], delays: Delays | None = None
    ) -> None:
        self.schedule = schedule
        self.rules = rules
        self.stages = stages
        self.values: dict[Edge, Any] = {}
        self.watch: Watch | None = None
        self.record: Record | None = None
        self.profile: Profile | None = None
        self._delays = Delays(schedule) if delays is None else delays
        self._since = 0  # the first micro-batch after the last drain
        self._updates = 0

    def step(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        """Load turn n's micro-batches and run what is ready. `loads`: for each, the loader's values by name."""
        self.load(n, loads)
        self._issue(n, None)

    def load(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        """Store the loader's values of turn n's micro-batches."""
        for microbatch, load in enumerate(loads, start=n * self.schedule.per_turn):
            for edge in self.rules.loads(microbatch):
                if edge.stage in self.stages:
                    self.values[edge] = load[edge.value]

    def losses(self, edges: Sequence[Edge]) -> list[Tensor]:
        """Remove losses from the values and return them; with replicas, the sum over all of them."""
        return list(map(self.values.pop, edges))

    def has(self, edges: Sequence[Edge]) -> bool:
        """Whether these values have been made, in all emulated replicas."""
        return self.values.keys() >= set(edges)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self.values

    @property
    def updates(self) -> int:
        """How many updates have begun, summed over stages, and over emulated replicas that update by themselves."""
        return self._updates

    def pause(self) -> None:  # noqa: B027 (most have nothing)
        """Tell other replicas, after a drain and before `settle`, not to wait for updates of this one."""

    def settle(self) -> None:
        """Make the copies of each stage in all replicas agree; everything is drained."""
        for stage in self.every_stage:
            stage.settle_replicas()

    @property
    def every_stage(self) -> list[Stage]:
        """The stages of this process, in all emulated replicas."""
        return list(self.stages.values())

    def drain(self, n: int) -> None:
        """Finish everything that entered before turn n. Raises ScheduleError if something cannot be finished."""
        until = n * self.schedule.per_turn
        for later in range(n, n + self.schedule.drain):
            self._issue(later, until)
        self._finish(until)
        self.begin(n)

    def begin(self, n: int) -> None:
        """Get ready for turn n, with nothing in flight: settle tied weights, and drop all values but losses."""
        self._since = n * self.schedule.per_turn
        sent = sorted((edge for edge in self.values if edge.value == "tied-weight"), key=lambda edge: edge.source)
        for user in dict.fromkeys(tie.user for tie in self.rules.ties if tie.user in self.stages):
            self.stages[user].settle([self.values[edge] for edge in sent if edge.stage == user])
        self.values = {edge: value for edge, value in self.values.items() if edge.stage == self.rules.num_stages}

    def restart(self, n: int) -> None:
        """Drop everything in flight and get ready for turn n."""
        self.values.clear()
        self.begin(n)

    @abstractmethod
    def _issue(self, n: int, until: int | None) -> None:
        """Run turn n's actions, or queue them until they are ready; skip those of micro-batches from `until` on."""

    @abstractmethod
    def _finish(self, until: int) -> None:
        """End a drain: raise ScheduleError if an action of a micro-batch before `until` has not run."""

    def _run(self, action: Action, flow: Flow) -> None:
        kind, index, microbatch = action
        stage = self.stages[index]
        given = operands(flow.needs, self.values)
        age, version = microbatch - self._since, None
        if kind == "F":
            version = self._since // self.schedule.per_turn + self._delays.version(index, age)
        elif kind in BACKWARD:
            delay = stage.updates - given["graph"].updates
            promised = self._delays.at(index, age)
            assert delay == promised, f"{action}: its weights are {delay} updates old, the schedule promises {promised}"
            if index in self.rules.recompute:
                delay = stage.updates - given["graph"].recomputed
                promised = self._delays.recompute_at(index, age)
                assert delay == promised, f"{action}: recomputed {delay} updates ago, the schedule promises {promised}"
        elif kind == "U":
            self._updates += 1
        start = 0 if self.record is None else perf_counter_ns()
        if self.profile is None:
            results = stage.run(kind, microbatch, given, version)
        else:
            with self.profile(action):
                results = stage.run(kind, microbatch, given, version)
        if self.record is not None:
            self.record(action, given, start, perf_counter_ns())
        for edge in flow.makes:
            value = results[edge.value]
            self.values[edge] = value[edge.stage] if edge.value in OF_STAGE else value
        if self.watch is not None:
            self.watch(action, given, results)
        for edge in flow.frees:
            del self.values[edge]


def count(
    recording: Recording, interpreter: Interpreter, action: Action, operands: Mapping[str, Any], time: int
) -> None:
    """Record, after an action, its stage's delay, the forwards it holds for their backward, and the staleness of its
    update on a parameter server.

    Called while the action's operands are still among the interpreter's values, and its results are not yet.
    """
    kind, stage, _ = action
    agreement = interpreter.stages[stage].agreement
    if kind == "U" and agreement is not None and agreement.staleness is not None:
        recording.count(f"staleness of stage {stage}", time, agreement.staleness)
    if kind in BACKWARD:
        delay = interpreter.stages[stage].updates - operands["graph"].updates
        recording.count(f"delay of stage {stage}", time, delay)
    if kind == "F" or kind in BACKWARD:
        held = sum(edge.stage == stage and edge.value in HELD for edge in interpreter.values)
        recording.count(f"forwards held by stage {stage}", time, held + (1 if kind == "F" else -1))
