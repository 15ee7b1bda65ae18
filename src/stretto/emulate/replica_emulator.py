"""Replicas of a pipeline on one device: each action is run in one after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.emulate.emulator import Emulator
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.rules import Flow
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import Stage


class EmulatedReplicas(Emulator):
    """All replicas do the same things in the same order, so one of them, the first, decides it for all.

    What is watched and recorded is the first one's.
    """

    def __init__(
        self,
        schedule: Schedule,
        rules: Rules,
        replicas: Sequence[Mapping[int, Stage]],
        delays: Delays | None = None,
    ) -> None:
        super().__init__(schedule, rules, replicas[0], delays)
        self._others = [Emulator(schedule, rules, stages, delays) for stages in replicas[1:]]

    @property
    def every_stage(self) -> list[Stage]:
        """Stage by stage, in the order of replicas."""
        return [interpreter.stages[index] for index in self.stages for interpreter in (self, *self._others)]

    def load(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        """Those of the first replica, then those of the next."""
        pieces = self.schedule.per_turn
        super().load(n, loads[:pieces])
        for number, other in enumerate(self._others, start=1):
            other.load(n, loads[number * pieces : (number + 1) * pieces])

    def begin(self, n: int) -> None:
        """Turn n comes next, and nothing is in flight."""
        super().begin(n)
        for other in self._others:
            other.begin(n)

    def restart(self, n: int) -> None:
        """Turn n comes next; whatever was in flight is dropped."""
        super().restart(n)
        for other in self._others:
            other.restart(n)

    def losses(self, edges: Sequence[Edge]) -> list[Tensor]:
        """The sums over all replicas, in their order."""
        total = torch.stack(super().losses(edges))
        for other in self._others:
            total = total + torch.stack(Interpreter.losses(other, edges))
        return list(total)

    def _run(self, action: Action, flow: Flow) -> None:
        super()._run(action, flow)
        for other in self._others:
            other._run(action, flow)
