"""Cures for delay, as data: which weights a stage's passes see, and how its optimizer's step changes.

Cures of the step are options of asynchronous pipelines: feedback=, rotate= and refresh=.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.errors import UsageError
from stretto.optimizers import OPTIMIZERS
from stretto.options.checks import is_among, is_number, is_whole, of_fields, shown

ANY_MOMENTUM = 0.9  # where it matters only that there is one


class Place(NamedTuple):
    """What a cure may depend on: the stage, how many there are, its steady-state delay, its optimizer's momentum.

    The delay is the mean over the micro-batches of an update: a fraction where some of them see one update more than
    others. recompute: how many of the delay's updates come after the stage's recompute, a mean as well; None where it
    does not recompute. mean_delay: the mean over all stages.
    """

    stage: int
    num_stages: int
    delay: float
    momentum: float
    recompute: float | None = None
    mean_delay: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Look `horizon(place)` updates ahead: along the velocity, the weights' last change, or the optimizer's step."""

    form: Literal["velocity", "weight", "step"]
    horizon: Callable[[Place], float]

    def __post_init__(self) -> None:
        of_fields("Prediction: ", self)


@dataclass(frozen=True)
class Correction:
    """Look `span(place)` updates back, along the running average of the changes of the weights (PipeMare's T2)."""

    span: Callable[[Place], float]

    def __post_init__(self) -> None:
        of_fields("Correction: ", self)


@dataclass(frozen=True)
class Rotation:
    """Step matrices in a rotated basis, of both sides or of one, that is refreshed every so many updates or so."""

    two_sided: bool = True
    refresh: int = 10

    def interval(self, place: Place) -> int:
        """Updates between two refreshes on a stage: in inverse proportion to its delay, half to twice `refresh`.

        A stage with the mean delay refreshes every `refresh` updates. Within those bounds all stages together refresh
        as often as if each did so every `refresh` updates.
        """
        share = place.mean_delay / place.delay if place.delay else 2.0 if place.mean_delay else 1.0
        return max(1, round(self.refresh * min(max(share, 0.5), 2.0)))


class StepCure(NamedTuple):
    """What a cure changes in the step of one stage: its feedback, and how often its matrices' bases are refreshed.

    `interval` is None where nothing is rotated. `along_step` says whether some pass sees weights that are predicted
    along the optimizer's step, of which Muon then keeps a part.
    """

    feedback: float = 0.0
    interval: int | None = None
    two_sided: bool = True
    along_step: bool = False


class WeightCopies(NamedTuple):
    """The copies of its trained weights that a stage keeps for what its passes see, beside the weights themselves.

    `forward`: predicted ones, from the first forward after an update to the next update. `backward`: predicted or past
    ones, made by each backward for itself. `always`: of weights or their changes before the last update; `updating` as
    many more while an update runs.
    """

    forward: int = 0
    backward: int = 0
    always: int = 0
    updating: int = 0


@dataclass(frozen=True)
class Cure:
    """How a method makes up for delay.

    forward, backward: the change of the weights that each pass sees; None for those of the method's policy.
    recompute: the weights that a second forward sees, part of the way that `forward` looks ahead or `backward` back.
    spike: whether the step makes up for the delay of its gradient (spike compensation). reschedule: updates until
    the learning rate is no longer divided for the delay (PipeMare's T1); None for never dividing. optimizer: the class
    of torch.optim that the method needs; None for any. feedback: how much of a step's difference to the last one is
    added to it (update-level error feedback); None for nothing. rotate: the basis of a matrix's step; None for its own.
    """

    forward: Prediction | None = None
    backward: Prediction | Correction | None = None
    recompute: Prediction | Correction | None = None
    spike: bool = False
    reschedule: int | None = None
    optimizer: str | None = None
    feedback: Callable[[Place], float] | None = None
    rotate: Rotation | None = None

    def __post_init__(self) -> None:
        of_fields("Cure: ", self)

    def at(self, place: Place) -> StepCure:
        """What it changes in the step of the stage there."""
        feedback = 0.0 if self.feedback is None else float(self.feedback(place))
        along_step = any(place.delay or prediction.horizon(place) for prediction in self.step_predictions)
        if self.rotate is None:
            return StepCure(feedback, along_step=along_step)
        return StepCure(feedback, self.rotate.interval(place), self.rotate.two_sided, along_step)

    def copies(self, place: Place) -> WeightCopies:
        """What its predictions and corrections keep of the weights of the stage there."""
        passes = [each for each in (self.forward, self.backward) if each is not None and looks(each, place)]
        corrections = sum(isinstance(each, Correction) for each in passes)
        formers = sum(isinstance(each, Prediction) and each.form == "weight" for each in passes)
        return WeightCopies(
            forward=int(self.forward in passes),
            backward=int(self.backward in passes),
            always=formers + corrections,
            updating=corrections,
        )

    @property
    def predictions(self) -> list[Prediction]:
        """Those of its passes that look ahead."""
        return [each for each in (self.forward, self.backward, self.recompute) if isinstance(each, Prediction)]

    @property
    def step_predictions(self) -> list[Prediction]:
        """Its predictions along the optimizer's step."""
        return [each for each in self.predictions if each.form == "step"]

    @property
    def changes_step(self) -> bool:
        """Whether `at` may differ from a plain step on some stage."""
        return self.feedback is not None or self.rotate is not None or bool(self.step_predictions)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of the optimizers that it works with, as in plans and settings; empty for any.

        Velocities are read off SGD alone.
        """
        forms = {prediction.form for prediction in self.predictions}
        if self.optimizer is not None:
            return (self.optimizer.lower(),)
        if "velocity" in forms:
            return ("sgd",)
        if self.rotate is not None:
            return ("adam", "adamw")
        known = tuple(name for name, optimizer in OPTIMIZERS.items() if optimizer.ahead and optimizer.late)
        return known if self.spike or "step" in forms else ()


def looks(cure: Prediction | Correction, place: Place) -> bool:
    """Whether a pass of the stage there sees other weights than the current ones."""
    return bool(cure.span(place) if isinstance(cure, Correction) else cure.horizon(place))


MOST_DELAY = 10_000
PREDICTING, FROM_LABELS = "gradients by ", "gradients, with labels, by "  # before the name of a head in plans


@dataclass(frozen=True)
class GradientPrediction:
    """How the module M behind a stage, which predicts the gradient of the stage's output, learns from the true one.

    M predicts the gradient of micro-batch n after it has learned from that of micro-batch n - `delay`. Its optimizer is
    the stage's function with `rate` times the stage's learning rate.
    """

    delay: int = 1
    rate: float = 1.0

    @property
    def keeps_graph(self) -> bool:
        """Whether no other learning step comes between a prediction and its own: then its graph serves for both."""
        return self.delay == 1

    def __post_init__(self) -> None:
        if not is_whole(self.delay) or not 1 <= self.delay <= MOST_DELAY:
            wanted = f"a whole number of micro-batches from 1 to {MOST_DELAY}"
            raise UsageError(f"synthetic-gradients(delay={shown(self.delay)}): {wanted}")
        if not is_number(self.rate) or not 0 <= self.rate < math.inf:
            raise UsageError(f"synthetic-gradients(rate={shown(self.rate)}): a number of at least 0")


def name_in_plans(head: str, *, labelled: bool) -> str:
    """The name of a gradient predictor's costs in plans; heads of this name have another one."""
    return f"{FROM_LABELS if labelled else PREDICTING}{head}"


def read_in_plans(name: str) -> tuple[str, bool, bool]:
    """The head behind a name in plans, whether it predicts gradients, and whether it reads labels for it."""
    for prefix, labelled in ((FROM_LABELS, True), (PREDICTING, False)):
        if name.startswith(prefix):
            return name.removeprefix(prefix), True, labelled
    return name, False, False


Feedback = float | Literal["delay"]
Rotate = bool | Literal["one-sided"]
STEP_CURES = ("feedback", "rotate", "refresh")
MOST_REFRESH = 10**9


def step_cure(name: str, feedback: Feedback, rotate: Rotate, refresh: int | None) -> Cure:
    """The cure of these options, of method `name`. Raises UsageError for a value out of range.

    feedback: the same number on all stages, 0 for none, or "delay": each stage's own delay.
    """
    return Cure(feedback=feedback_of(name, feedback), rotate=rotation_of(name, rotate, refresh))


def feedback_of(name: str, feedback: Feedback) -> Callable[[Place], float] | None:
    """How much feedback a stage gets; None for none on any."""
    if is_among(feedback, ("delay",)):
        return lambda place: place.delay
    if isinstance(feedback, str) or not is_number(feedback) or not 0 <= feedback < math.inf:
        raise UsageError(
            f"{name}(feedback={shown(feedback)}): a number of 0 or more, such as 1 for a delay of one update, or "
            "'delay' for each stage's own"
        )
    c = float(feedback)
    return (lambda _: c) if c else None


def rotation_of(name: str, rotate: Rotate, refresh: int | None) -> Rotation | None:
    """The rotation of matrices; None for none."""
    if not isinstance(rotate, bool) and not is_among(rotate, ("one-sided",)):
        raise UsageError(f"{name}(rotate={shown(rotate)}): choose True, 'one-sided' or False")
    if refresh is not None and rotate is False:
        raise UsageError(f"{name}(refresh={shown(refresh)}) needs a basis to refresh: add rotate=True or 'one-sided'")
    if refresh is not None and not (is_whole(refresh) and 1 <= refresh <= MOST_REFRESH):
        raise UsageError(f"{name}(refresh={shown(refresh)}): a whole number of updates, at least 1")
    if rotate is False:
        return None
    return Rotation(two_sided=rotate is True, refresh=10 if refresh is None else refresh)


def cures_in_words(cure: Cure) -> str:
    """The cures of `step_cure` for a method's summary: ", feedback, rotation", or nothing."""
    named = (("feedback", cure.feedback is not None), ("rotation", cure.rotate is not None))
    return "".join(f", {name}" for name, on in named if on)
