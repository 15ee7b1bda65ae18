"""What cures of the optimizer's step cost: update-level feedback one more pass, basis rotation products and bases.

What an optimizer's step on whole matrices computes beside its passes over numbers: Muon, SOAP, basis rotation.

A basis of side n of a matrix [n, m] takes (`optim/soap.py`, `optim/basis_rotation.py`):

    each step      G G^T; U^T G, U^T M and U times the step: four products of 2 n^2 m FLOPs
    each refresh   L U, 2 n^3 FLOPs, and the QR factorisation with its Q, 4/3 n^3 each
                   rotation also turns the second moments: U'^T U, 2 n^3, and a product of 2 n^2 m

A QR factorisation makes one reflection a column, one after the other: n kernels that wait for each other, and products
of many columns for the rest and for Q (ours). Where kernels are priced, 2,048 columns in float32 on an A100 take 14.3
ms; 16.0 were measured (pytorch issue 151066).
"""

from collections.abc import Iterable, Sequence

from stretto.cost.layer_table import Affine, LayerCost, Work, Works
from stretto.methods.cure import StepCure
from stretto.optimizers import (
    BRAIN,
    ITERATIONS,
    LARGEST_BASIS,
    BasisWork,
    MatrixWork,
    Stepping,
    optimizer_of,
    rotated_sides,
)

QR = "qr"  # the sort of operator of QR factorisations
PRODUCTS = "products"  # that of products of matrices alone, where they were measured: layers' have autograd's time
BFLOAT16 = "bfloat16-products"  # that of products in bfloat16, where they were measured: CPUs may be slow at them
NOT_WIDE = ("bfloat16", "float16", "float8")  # in which no basis is made: float32 masters are stepped


def factorisations(bases: BasisWork, item: int) -> Work:
    """A QR factorisation of each basis with its Q; R and Q are each read and written."""
    return Work(QR, bases.lengths, Affine(8 / 3 * bases.cubes), Affine(4 * item * bases.squares))


def basis_step(bases: BasisWork, item: int, sort: str = "linear") -> Works:
    """The products of each step with bases of numbers of `item` bytes, as operators of a sort."""
    if not bases.number:
        return ()
    read_and_written = 7 * bases.squares + 8 * bases.sizes
    return (Work(sort, 4 * bases.number, Affine(8 * bases.rotations), Affine(item * read_and_written)),)


def basis_refresh(bases: BasisWork, item: int, sort: str = "linear", *, turns_second_moments: bool) -> Works:
    """The products and factorisations of each refresh of bases."""
    if not bases.number:
        return ()
    calls, flops, numbers = bases.number, 2 * bases.cubes, 3 * bases.squares
    if turns_second_moments:  # U'^T U, its squares, and these times the moments
        calls, flops = 3 * calls, flops + 2 * bases.cubes + 2 * bases.rotations
        numbers += 7 * bases.squares + 2 * bases.sizes
    return (Work(sort, calls, Affine(flops), Affine(item * numbers)), factorisations(bases, item))


def newton_schulz(matrices: MatrixWork, sort: str = "linear") -> Works:
    """The products of Muon's iterations of a step, in bfloat16, as operators of a sort."""
    if not matrices.products:
        return ()
    calls, flops, moved = (ITERATIONS * each for each in (matrices.products, matrices.iteration, matrices.moved))
    return (Work(sort, calls, Affine(flops), Affine(moved)),)


def soap_scratch(rows: int, columns: int) -> float:
    """Numbers that a step of SOAP has beside its state for a matrix, the most where it refreshes its bases."""
    longest = max((side for side in (rows, columns) if side <= LARGEST_BASIS), default=0)
    return 3.0 * rows * columns + 3.0 * longest**2


def rotation_scratch(rows: int, columns: int, sides: Sequence[int]) -> float:
    """Numbers that a rotated step has beside its state for a matrix, at its end or in a refresh of its longest side."""
    return max((3.0 + len(sides)) * rows * columns, 4.0 * max(sides, default=0) ** 2)


def wide_dtype(dtype: str) -> str:
    """The dtype in which bases are made on a machine whose layers compute in `dtype`: at least float32."""
    return "float32" if dtype.startswith(NOT_WIDE) else dtype


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
        kept += BRAIN * layer.matrices.hidden  # Muon's last orthogonalised updates, kept in bfloat16
    return kept


def scratch_bytes(cure: StepCure, layer: LayerCost, stepping: Stepping) -> float:
    """Temporary bytes of a rotated step, for the matrix of the layer that takes most."""
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
