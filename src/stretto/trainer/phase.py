"""A stretch of training with one schedule: a method that changes its schedule goes through several."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import PhaseSettings


@dataclass(frozen=True)
class Phase:
    """The interpreter of the phase's schedule, and the settings of each of its stages, in the interpreter's order."""

    interpreter: Interpreter
    settings: Sequence[PhaseSettings]

    def begin(self, n: int) -> None:
        """Begin the phase at turn n, with nothing in flight."""
        for stage, settings in zip(self.interpreter.every_stage, self.settings, strict=True):
            stage.apply_phase(settings, stage.index in self.interpreter.rules.recompute)
        self.interpreter.restart(n)

    def end(self) -> None:
        """End the phase: its observer sees no more."""
        self.interpreter.watch = None
