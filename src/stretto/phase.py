"""A stretch of training with one schedule: a method that changes its schedule goes through several."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.emulate import Emulator
from stretto.stage import Practice, Stage


@dataclass(frozen=True)
class Phase:
    """Who runs the schedule, and how each stage trains meanwhile."""

    emulator: Emulator
    stages: Sequence[Stage]
    practices: Sequence[Practice]

    def begin(self, n: int) -> None:
        """Turn n is the phase's first; nothing is in flight."""
        for stage, practice in zip(self.stages, self.practices, strict=True):
            stage.adopt(practice, stage.index in self.emulator.rules.recompute)
        self.emulator.restart(n)

    def end(self) -> None:
        """Another phase is about to begin."""
        self.emulator.watch = None
