"""A stretch of training with one schedule: a method that changes its schedule goes through several."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import PhaseSettings


@dataclass(frozen=True)
class Phase:
    """What runs the schedule, and how each of its stages trains meanwhile, in their order."""

    interpreter: Interpreter
    practices: Sequence[PhaseSettings]

    def begin(self, n: int) -> None:
        """Turn n is the phase's first; nothing is in flight."""
        for stage, practice in zip(self.interpreter.every_stage, self.practices, strict=True):
            stage.apply_phase(practice, stage.index in self.interpreter.rules.recompute)
        self.interpreter.restart(n)

    def end(self) -> None:
        """Another phase is about to begin."""
        self.interpreter.watch = None
