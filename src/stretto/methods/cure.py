"""Cures for delay, as data: which weights a stage's passes see, and how its optimizer's step changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Place(NamedTuple):
    """What a cure may depend on: the stage, how many there are, its steady-state delay, its optimizer's momentum.

    The delay is the mean over the micro-batches of an update: a fraction where some of them see one update more than
    others. recompute: how many of the delay's updates come after the stage's recompute, a mean as well; None where it
    does not recompute.
    """

    stage: int
    num_stages: int
    delay: float
    momentum: float
    recompute: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Look `horizon(place)` updates ahead: along the velocity, the weights' last change, or the optimizer's step."""

    form: Literal["velocity", "weight", "step"]
    horizon: Callable[[Place], float]


@dataclass(frozen=True)
class Correction:
    """Look `span(place)` updates back, along the running average of the changes of the weights (PipeMare's T2)."""

    span: Callable[[Place], float]


@dataclass(frozen=True)
class Cure:
    """How a method makes up for delay.

    forward, backward: the change of the weights that each pass sees; None for those of the method's policy.
    recompute: the weights that a second forward sees, part of the way that `forward` looks ahead or `backward` back.
    spike: whether the step makes up for the delay of its gradient (spike compensation). reschedule: updates until
    the learning rate is no longer divided for the delay (PipeMare's T1); None for never dividing. optimizer: the class
    of torch.optim that the method needs; None for any.
    """

    forward: Prediction | None = None
    backward: Prediction | Correction | None = None
    recompute: Prediction | Correction | None = None
    spike: bool = False
    reschedule: int | None = None
    optimizer: str | None = None

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of the optimizers that it works with, as in plans and settings; empty for any.

        Velocities are read off SGD alone, an optimizer's own steps off those of `optim/direction.py`.
        """
        passes = (self.forward, self.backward, self.recompute)
        forms = {prediction.form for prediction in passes if isinstance(prediction, Prediction)}
        if self.optimizer is not None:
            return (self.optimizer.lower(),)
        if self.spike or "velocity" in forms:
            return ("sgd",)
        return ("sgd", "adam", "adamw", "nadam", "lion", "muon", "soap") if "step" in forms else ()
