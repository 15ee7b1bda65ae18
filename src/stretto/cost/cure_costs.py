"""What cures of the optimizer's step cost: update-level feedback one more pass, basis rotation products and bases."""

from collections.abc import Iterable

from stretto.cost.layer_table import LayerCost, Works
from stretto.cost.matrix_step import basis_refresh, basis_step, kept_update, rotation_scratch
from stretto.methods.cure import StepCure
from stretto.optimizers import BasisWork, Stepping, optimizer_of, rotated_sides

FEEDBACK_PASSES = 11 / 3
"""Passes of an addition of gradients, three accesses a number: two copy w; u, u_prev - u and w + c (...) have three."""
PLAIN = StepCure()  # of a stage whose step nothing changes


def feedback_tensors(cure: StepCure, stepping: Stepping) -> int:
    """How many times the bytes of its gradients a stage keeps for its last step."""
    return stepping.copies if cure.feedback else 0


def matrix_bytes(cure: StepCure, layer: LayerCost, stepping: Stepping) -> float:
    """Bytes of what is kept of a layer's matrices: products of gradients and bases, Muon's last update."""
    kept = 0.0
    if cure.interval is not None:
        kept += 2 * rotated(cure, layer).squares * item_of(layer, stepping)
    if cure.along_step and optimizer_of(stepping.name).on_matrices == "orthogonalise":
        kept += kept_update(layer.matrices)
    return kept


def scratch_bytes(cure: StepCure, layer: LayerCost, stepping: Stepping) -> float:
    """Bytes that a rotated step has for a while beside what is kept, for the matrix of the layer that takes most."""
    numbers = (rotation_scratch(*shape, sides(cure, shape)) for shape in layer.matrix_shapes if sides(cure, shape))
    return max(numbers, default=0.0) * item_of(layer, stepping)


def rotation_works(cure: StepCure, layer: LayerCost, stepping: Stepping, sort: str = "linear") -> tuple[Works, Works]:
    """The products of a step's rotations of a layer's matrices, as operators of a sort.

    And those of a refresh with its factorisations.
    """
    bases, item = rotated(cure, layer), round(item_of(layer, stepping))
    return basis_step(bases, item, sort), basis_refresh(bases, item, sort, turns_second_moments=True)


def rotated(cure: StepCure, layer: LayerCost) -> BasisWork:
    """The sides of a layer's matrices that are rotated."""
    return total(BasisWork.of(*shape, sides(cure, shape)) for shape in layer.matrix_shapes)


def total(bases: Iterable[BasisWork]) -> BasisWork:
    """The sum of several."""
    return sum(bases, start=BasisWork())


def item_of(layer: LayerCost, stepping: Stepping) -> float:
    """Bytes of a number that is stepped."""
    return stepping.copies * layer.parameter_bytes / layer.parameters if layer.parameters else 0.0


def sides(cure: StepCure, shape: tuple[int, int]) -> list[int]:
    """The lengths of the sides of a matrix that are rotated."""
    if cure.interval is None:
        return []
    chosen = rotated_sides(shape, two_sided=cure.two_sided)
    return [length for length, is_rotated in zip(shape, chosen, strict=True) if is_rotated]
