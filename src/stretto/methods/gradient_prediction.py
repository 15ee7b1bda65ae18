"""How the modules that predict gradients learn: how late, and how fast."""

import math
from dataclasses import dataclass

from stretto.errors import UsageError
from stretto.options.checks import is_number, is_whole, shown

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
    """The name under which plans know the costs of what predicts gradients, apart from the heads with that name."""
    return f"{FROM_LABELS if labelled else PREDICTING}{head}"


def read_in_plans(name: str) -> tuple[str, bool, bool]:
    """The head behind a name in plans, whether it predicts gradients, and whether it reads labels for it."""
    for prefix, labelled in ((FROM_LABELS, True), (PREDICTING, False)):
        if name.startswith(prefix):
            return name.removeprefix(prefix), True, labelled
    return name, False, False
