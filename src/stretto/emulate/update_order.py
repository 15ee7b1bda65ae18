"""Replicas that train by themselves, and whose updates come in a given order: what a parameter server did, again."""

from collections.abc import Mapping, Sequence
from functools import partial as bound

from stretto.emulate.emulator import Emulator
from stretto.emulate.replica_emulator import EmulatedReplicas
from stretto.errors import UsageError
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.rules import Flow
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import Stage


class OrderedReplicas(EmulatedReplicas):
    """Each replica goes as far as it can; a stage's U waits until it is that replica's turn to update the stage.

    The numbers depend on each stage's order of updates only, so a run that was logged comes out the same.
    """

    def __init__(
        self, schedule: Schedule, rules: Rules, replicas: Sequence[Mapping[int, Stage]], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, replicas, delays)
        self._all: list[Emulator] = [self, *self._others]
        for each in self._all:
            each.may = bound(is_next, each.stages)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight in any replica."""
        return all(not each.values for each in self._all)

    @property
    def updates(self) -> int:
        """How many updates have begun in all replicas."""
        return sum(each._updates for each in self._all)

    def has(self, edges: Sequence[Edge]) -> bool:
        """Whether all replicas have made these values."""
        return all(edge in each.values for each in self._all for edge in edges)

    def _issue(self, n: int, until: int | None) -> None:
        for each in self._all:
            each.enqueue(n, until)
        while any(each.pump() for each in self._all):
            pass

    def _run(self, action: Action, flow: Flow) -> None:
        Interpreter._run(self, action, flow)

    def _finish(self, until: int) -> None:
        heads = [(r, queue[0][0]) for r, each in enumerate(self._all) for queue in each.queues if queue]
        left = [f"{action} of replica {r}" for r, action in heads if action.kind == "U"]
        if left:
            raise UsageError(
                f"the given order of updates does not fit this run: {', '.join(left)} wait for others; replay it with "
                "the same method, stages, replicas and minibatches"
            )


def is_next(stages: Mapping[int, Stage], action: Action) -> bool:
    """Whether an action may run: an update has to wait for its turn."""
    agreement = stages[action.stage].agreement
    return action.kind != "U" or agreement is None or agreement.is_next
