"""The trade-off of batch size: larger batches need fewer steps and more examples. No torch in here."""

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
        """The steps that a run at this batch size needs."""
        return self.min_steps + self.min_examples / batch


def fit(runs: Sequence[tuple[float, float]]) -> Tradeoff | None:
    """Fit the trade-off to runs of several batch sizes, each as (steps, examples) to the goal.

    Least squares of `min_steps / S + min_examples / E - 1`, which is the relative error of S. None if the runs do not
    determine it: all have one batch size, or a minimum would not be positive. More batch sizes are needed then.
    """
    minima = positive_weights([(1 / steps, 1 / examples) for steps, examples in runs])
    return None if minima is None else Tradeoff(*minima)


def positive_weights(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The p and q for which `p x + q y` is closest to 1, in least squares; None unless both are positive."""
    xx, yy = sum(x * x for x, _ in pairs), sum(y * y for _, y in pairs)
    xy, sum_x, sum_y = sum(x * y for x, y in pairs), sum(x for x, _ in pairs), sum(y for _, y in pairs)
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:  # all pairs in one direction
        return None
    p, q = (sum_x * yy - sum_y * xy) / determinant, (sum_y * xx - sum_x * xy) / determinant
    return (p, q) if p > 0 and q > 0 else None
