"""Replicas of a pipeline on one device: each action runs in one replica after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.emulate.emulator import Emulator
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.dataflow import Flow
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import Stage


class EmulatedReplicas(Emulator):
    """All replicas run the same actions in the order that the first one decides.

    Observers and recordings see the first replica only.
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
        """All replicas' stages: stage 0 of each replica in order, then stage 1 of each, and so on."""
        return [interpreter.stages[index] for index in self.stages for interpreter in (self, *self._others)]

    def load(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        """Load turn n's micro-batches: `loads` are those of the first replica, then those of the next."""
        count = self.schedule.per_turn
        super().load(n, loads[:count])
        for number, other in enumerate(self._others, start=1):
            other.load(n, loads[number * count : (number + 1) * count])

    def begin(self, n: int) -> None:
        """Start at turn n in every replica, with nothing in flight."""
        super().begin(n)
        for other in self._others:
            other.begin(n)

    def restart(self, n: int) -> None:
        """Drop all actions and values in flight in every replica; turn n comes next."""
        super().restart(n)
        for other in self._others:
            other.restart(n)

    def losses(self, edges: Sequence[Edge]) -> list[Tensor]:
        """The losses, each summed over the replicas in order."""
        total = torch.stack(super().losses(edges))
        for other in self._others:
            total = total + torch.stack(Interpreter.losses(other, edges))
        return list(total)

    def _run(self, action: Action, flow: Flow) -> None:
        super()._run(action, flow)
        for other in self._others:
            other._run(action, flow)
