"""Steps against examples: what a larger batch saves of one and costs of the other. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tradeoff:
    """`(S / min_steps - 1) (E / min_examples - 1) = 1`, for the S steps and E examples that reach some goal.

    McCandlish et al. 2018, arXiv 1812.06162.
    """

    min_steps: float
    min_examples: float

    @property
    def critical_batch(self) -> float:
        """The batch that takes twice the least steps and twice the least examples."""
        return self.min_examples / self.min_steps

    def steps(self, batch: float) -> float:
        """What a run at this batch size needs."""
        return self.min_steps + self.min_examples / batch


def fit(runs: Sequence[tuple[float, float]]) -> Tradeoff | None:
    """The curve through runs of several batch sizes, each as (steps, examples) to the goal.

    The equation is `min_steps / S + min_examples / E = 1`, linear in both; the sum of the squares of what it is off by
    is least, which is the error of S in parts of S. None where the runs do not bend as it does (all of one batch size,
    or one minimum below 0: more batch sizes are needed to tell).
    """
    a, c = sum(1 / s**2 for s, _ in runs), sum(1 / e**2 for _, e in runs)
    b, u, v = sum(1 / (s * e) for s, e in runs), sum(1 / s for s, _ in runs), sum(1 / e for _, e in runs)
    determinant = a * c - b * b
    if determinant <= 1e-12 * a * c:
        return None
    least = Tradeoff((u * c - v * b) / determinant, (v * a - u * b) / determinant)
    return least if least.min_steps > 0 and least.min_examples > 0 else None
