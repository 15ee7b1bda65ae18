"""Cures for delay, as data: what a method wants of a stage's weights and of its optimizer's step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Place(NamedTuple):
    """What a cure may depend on: the stage, how many there are, its steady-state delay, its optimizer's momentum.

    The delay is the mean over the micro-batches of an update: a fraction where some of them see one update more than
    others. recompute: how many of the delay's updates come after the stage has recomputed, on average, too; None where
    it does not.
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
    """forward, backward: the weights that each sees; None for those its method's policy gives.

    recompute: the weights that a second forward sees, part of the way that `forward` looks ahead or `backward` back.
    spike: whether the step makes up for the delay of what it applies (spike compensation). reschedule: updates until
    the learning rate is no longer divided for the delay (PipeMare's T1); None for never dividing. optimizer: the class
    of torch.optim that the method is built on, if only one will do.
    """

    forward: Prediction | None = None
    backward: Prediction | Correction | None = None
    recompute: Prediction | Correction | None = None
    spike: bool = False
    reschedule: int | None = None
    optimizer: str | None = None

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The optimizers that it works with, as plans and settings call them; none where any will do.

        Velocities are read off SGD alone, an optimizer's own steps off SGD and Adam's kin.
        """
        forms = {each.form for each in (self.forward, self.backward, self.recompute) if isinstance(each, Prediction)}
        if self.optimizer is not None:
            return (self.optimizer.lower(),)
        if self.spike or "velocity" in forms:
            return ("sgd",)
        return ("sgd", "adam", "adamw") if "step" in forms else ()
