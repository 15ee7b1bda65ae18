"""Gradient noise, and the batch size beyond which it no longer matters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.analysis.frozen_model import flat_gradient, frozen, outputs
from stretto.errors import UsageError
from stretto.losses import Loss, mean_and_weight
from stretto.nn.batch import Batches, first_size


@dataclass(frozen=True)
class NoiseScale:
    """Estimates: `trace` of the covariance of one example's gradient, `square` = |G|^2 of the true gradient.

    Both are unbiased, so `square` may be negative where noise dominates. Average each over several measurements before
    dividing them for the `scale`.
    """

    trace: float
    square: float

    @property
    def scale(self) -> float | None:
        """tr(Sigma) / |G|^2, the simple noise scale (McCandlish et al. 2018, arXiv 1812.06162, section 2.2).

        In examples. It estimates the critical batch size, up to which twice the batch needs half the steps; None where
        `square` is not positive.
        """
        return self.trace / self.square if self.square > 0 else None


def estimate(small: tuple[int, float], large: tuple[int, float]) -> NoiseScale:
    """Estimate from |gradient|^2 at two batch sizes, each as (examples, mean square of the norm).

    `|G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)`, `tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)` (ibid., appendix A.1).
    """
    (b, at_b), (B, at_B) = small, large
    if not 0 < b < B:
        raise UsageError(f"batches of {b} and {B} examples: the second has to be larger, and the first not empty")
    return NoiseScale(trace=(at_b - at_B) / (1 / b - 1 / B), square=(B * at_B - b * at_b) / (B - b))


def noise_scale(model: nn.Module, loss: Loss, batches: Iterable[tuple[Any, Any]]) -> NoiseScale:
    """Estimate from the gradients of two or more batches (x, y) of one size, and of all of them together.

    Examples count as independent draws; dropout and batch statistics are off. It costs a backward for each batch; small
    batches give better estimates. Raises UsageError for a single batch, and for batches of several sizes.
    """
    total: Tensor | None = None
    squares, sizes = list[float](), list[int]()
    checked = Batches("noise_scale", batches)
    with frozen(model) as parameters, checked.explaining_misfits():
        for x, y in checked:
            gradient = flat_gradient(mean_and_weight(loss, outputs(model, x), y, 1)[0], parameters).double()
            squares.append(float(gradient @ gradient))
            sizes.append(first_size(x))
            total = gradient if total is None else total.add_(gradient)
    if total is None or len(sizes) < 2 or len(set(sizes)) > 1:
        raise UsageError(f"batches of {sizes} examples: noise wants two or more batches, all of one size")
    mean = total / len(sizes)
    together = sizes[0] * len(sizes)
    return estimate((sizes[0], sum(squares) / len(squares)), (together, float(mean @ mean)))
