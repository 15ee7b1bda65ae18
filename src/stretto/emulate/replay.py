"""Emulated replicas whose updates come in a given order, to replay a run with a parameter server."""

from collections.abc import Mapping, Sequence
from functools import partial as bound

from stretto.emulate.emulator import Emulator
from stretto.emulate.replica_emulator import EmulatedReplicas
from stretto.errors import UsageError
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.dataflow import Flow
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import Stage


class OrderedReplicas(EmulatedReplicas):
    """Each replica runs as far as it can; a stage's U waits until the next update of that stage is the replica's.

    Results depend on each stage's order of updates only, so a replay of a logged order is exact.
    """

    def __init__(
        self, schedule: Schedule, rules: Rules, replicas: Sequence[Mapping[int, Stage]], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, replicas, delays)
        self._emulators: list[Emulator] = [self, *self._others]
        for emulator in self._emulators:
            emulator.may_run = bound(is_next, emulator.stages)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight in any replica."""
        return all(not emulator.values for emulator in self._emulators)

    @property
    def updates(self) -> int:
        """How many updates have begun in all replicas."""
        return sum(emulator._updates for emulator in self._emulators)

    def has(self, edges: Sequence[Edge]) -> bool:
        """Whether all replicas have made these values."""
        return all(edge in emulator.values for emulator in self._emulators for edge in edges)

    def _issue(self, n: int, until: int | None) -> None:
        for emulator in self._emulators:
            emulator.enqueue(n, until)
        while any(emulator.pump() for emulator in self._emulators):
            pass

    def _run(self, action: Action, flow: Flow) -> None:
        Interpreter._run(self, action, flow)

    def _finish(self, until: int) -> None:
        waiting = [(r, queue[0][0]) for r, emulator in enumerate(self._emulators) for queue in emulator.queues if queue]
        updates = [f"{action} of replica {r}" for r, action in waiting if action.kind == "U"]
        if updates:
            raise UsageError(
                f"the given order of updates does not fit this run: {', '.join(updates)} wait for others; replay it "
                "with the same method, stages, replicas and minibatches"
            )


def is_next(stages: Mapping[int, Stage], action: Action) -> bool:
    """Whether an action may run: any action but an update that is not the stage's next one."""
    agreement = stages[action.stage].agreement
    return action.kind != "U" or agreement is None or agreement.is_next
