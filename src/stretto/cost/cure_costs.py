"""What cures of the optimizer's step cost: update-level feedback one more pass, basis rotation products and bases."""

from collections.abc import Sequence

from stretto.cost.layer_table import Affine, LayerCost, Work
from stretto.methods.cure import StepCure
from stretto.optimizers import rotated_sides

FEEDBACK_PASSES = 11 / 3
"""Passes of an addition of gradients, three accesses a number: two copy w; u, u_prev - u and w + c (...) have three."""
REFRESH = 14 / 3
"""FLOPs of a refresh of a basis of n columns, over n^3: a product, 2, and a QR with its Q, 4/3 each."""


def feedback_bytes(cure: StepCure, gradients: float) -> float:
    """Bytes of the last step of weights whose gradients take so many."""
    return gradients if cure.feedback else 0.0


def rotation_bytes(cure: StepCure, layers: Sequence[LayerCost]) -> float:
    """Bytes of the products and bases of the layers' matrices."""
    return sum(
        2 * side**2 * layer.parameter_bytes / layer.parameters
        for layer in layers
        for shape in layer.matrix_shapes
        for side in sides(cure, shape)
    )


def rotation_work(cure: StepCure, layers: Sequence[LayerCost]) -> Work:
    """The FLOPs of a step's rotations, as linear layers compute, with a step's share of a refresh.

    For a matrix [n, m] and a side n: the product of the gradient with itself, gradient and momentum into the basis,
    the step out of it, each 2 n^2 m. A QR takes longer than its FLOPs say.
    """
    flops = calls = 0.0
    for layer in layers:
        for n, m in layer.matrix_shapes:
            for side in sides(cure, (n, m)):
                flops += 8 * side * n * m + REFRESH * side**3 / (cure.interval or 1)
                calls += 4
    return Work("linear", calls, Affine(flops), Affine(0.0))


def sides(cure: StepCure, shape: tuple[int, int]) -> list[int]:
    """The lengths of the sides of a matrix that are rotated."""
    if cure.interval is None:
        return []
    chosen = rotated_sides(shape, two_sided=cure.two_sided)
    return [length for length, is_rotated in zip(shape, chosen, strict=True) if is_rotated]
