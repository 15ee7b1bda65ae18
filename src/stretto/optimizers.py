"""The optimizers by name: the class, what its state takes, and the learning rates that suit it. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, shown

BRAIN = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class BasisWork:
    """The sides of matrices that are turned into a basis of their own, as sums: side n of each matrix [n, m] or [m, n].

    There are `number` of them; `lengths` sums n, `squares` n^2, `cubes` n^3, `rotations` n^2 m, `sizes` n m.
    """

    number: int = 0
    lengths: float = 0.0
    squares: float = 0.0
    cubes: float = 0.0
    rotations: float = 0.0
    sizes: float = 0.0

    @classmethod
    def of(cls, rows: int, columns: int, sides: Sequence[int]) -> "BasisWork":
        """That of one matrix, whose sides of these lengths are turned."""
        size = float(rows * columns)
        squares, cubes = (float(sum(side**power for side in sides)) for power in (2, 3))
        return cls(len(sides), float(sum(sides)), squares, cubes, size * sum(sides), size * len(sides))

    def __add__(self, other: "BasisWork") -> "BasisWork":
        return BasisWork(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class MatrixWork:
    """State and work of optimizers of whole matrices for one layer, as sums over its matrices.

    `hidden` is how many numbers the matrices of hidden layers have, `iteration` the FLOPs and `moved` the bytes of one
    Newton-Schulz iteration on all of them, `products` how many products those are. `bases` are both sides of all
    matrices and kernels, up to LARGEST_BASIS. A matrix that layers share counts in the first one.
    """

    hidden: float = 0.0
    iteration: float = 0.0
    moved: float = 0.0
    products: int = 0
    bases: BasisWork = BasisWork()

    @classmethod
    def of(cls, rows: int, columns: int, *, hidden: bool) -> "MatrixWork":
        """That of one matrix: k is its smaller side, l the larger one.

        An iteration is `A = X X^T` (2 k k l FLOPs), `A A` (2 k^3) and `A X` (2 k k l), with 2 k l + k^2, 4 k^2 and
        k^2 + 3 k l numbers read and written.
        """
        small, large = sorted((rows, columns))
        bases = [side for side in (rows, columns) if side <= LARGEST_BASIS]
        return cls(
            hidden=rows * columns * hidden,
            iteration=(4.0 * small**2 * large + 2.0 * small**3) * hidden,
            moved=BRAIN * (5.0 * small * large + 6.0 * small**2) * hidden,
            products=3 * hidden,
            bases=BasisWork.of(rows, columns, bases),
        )

    def __add__(self, other: "MatrixWork") -> "MatrixWork":
        return MatrixWork(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


NO_MATRICES = MatrixWork()
LARGEST_BASIS = 10_000  # a longer side (a vocabulary's, say) is not rotated: SOAP's `largest`
REFRESH_EVERY = 10  # its `every`
ITERATIONS = 5  # Muon's `ns_steps`


NORMS, MATRICES = "the norms of whole layers", "whole matrices"
IN_STEP = "in its own step"


class Optimizer(NamedTuple):
    """One row of the table: all that anything asks of an optimizer. A new one is a file in `optim/` and its row here.

    `family` is the one whose calibrated rates apply; `states` the numbers of state for each parameter, `accesses` a
    step's memory accesses for each. `rates` are learning rates to compare, for small networks. `momentum` is the
    default of the `--momentum` option: the first beta where there are betas. `on_matrices` says what it does beside
    that with matrices.

    `whole` is what a step needs of a layer in one process, NORMS or MATRICES; empty where it changes each element by
    that element's gradients and state alone. `gathers`: it gathers matrices of which processes have shards itself.
    `rows_only`: without momentum, a step with a sparse gradient changes the gradient's rows alone. `ahead` names the
    function "module:function" that moves a weight along the predicted step (`optim/direction.py`). `late` names the one
    that adds to a step what a late gradient has missed (`optim/spike.py`); it is IN_STEP where the step itself reads a
    group's "delay", empty where nobody knows how. `unfit` is why no setting may name it.
    """

    place: str  # module:class
    family: str = ""
    states: int = 0
    accesses: int = 0
    rates: tuple[float, ...] = ()
    momentum: float = 0.9
    on_matrices: Literal["", "orthogonalise", "rotate"] = ""
    whole: str = ""
    gathers: bool = False
    rows_only: bool = False
    ahead: str = ""
    late: str = ""
    unfit: str = ""

    def state_numbers(self, parameters: float, matrices: MatrixWork) -> float:
        """How many numbers of state it keeps for a layer with so many trained parameters."""
        kept = self.states * parameters
        if self.on_matrices == "orthogonalise":
            return kept - matrices.hidden  # one average, not two
        return kept + 2 * matrices.bases.squares if self.on_matrices == "rotate" else kept

    @property
    def scratch(self) -> int:
        """How many tensors of the size of the largest parameter a step has beside its state."""
        kinds = {"orthogonalise": 3, "rotate": 4}
        return kinds.get(self.on_matrices, 2 if self.states > 1 else 0)


@dataclass(frozen=True)
class Stepping:
    """An optimizer by name, and how it steps: `longer` is how many times as long its passes over numbers take, as they
    do where `masters`, float32 copies of parameters of 16 bits, are stepped.
    """

    name: str
    longer: float = 1.0
    masters: bool = False

    @property
    def copies(self) -> int:
        """How many times the bytes of a parameter a tensor of the step has."""
        return 2 if self.masters else 1


ADAM_RATES = (0.001, 0.003, 0.01)
ALONG_ADAM, LATE_ADAM = "stretto.optim.direction:along_adam", "stretto.optim.spike:add_adam_difference"
OPTIMIZERS: Mapping[str, Optimizer] = {
    # with momentum: reads weight, gradient, velocity, writes weight and velocity
    "sgd": Optimizer(
        "torch.optim:SGD",
        "sgd",
        1,
        5,
        (0.003, 0.01, 0.03, 0.1),
        rows_only=True,
        ahead="stretto.optim.direction:along_velocity",
        late="stretto.optim.spike:add_sgd_difference",
    ),
    "lars": Optimizer("stretto.optim:LARS", "sgd", 1, 5, (0.1, 0.3, 1.0, 3.0), whole=NORMS),
    "adam": Optimizer("torch.optim:Adam", "adam", 2, 7, ADAM_RATES, ahead=ALONG_ADAM, late=LATE_ADAM),
    "adamw": Optimizer("torch.optim:AdamW", "adam", 2, 7, ADAM_RATES, ahead=ALONG_ADAM, late=LATE_ADAM),
    # the momentum is that of the paper of `nesterov`
    "nadam": Optimizer(
        "torch.optim:NAdam", "adam", 2, 7, ADAM_RATES, 0.99, ahead="stretto.optim.direction:along_nadam", late=LATE_ADAM
    ),
    "lamb": Optimizer("stretto.optim:LAMB", "adam", 2, 7, (0.003, 0.01, 0.03), whole=NORMS),
    "lion": Optimizer(
        "stretto.optim:Lion",
        "sgd",
        1,
        5,
        (0.0001, 0.0003, 0.001, 0.003),
        ahead="stretto.optim.direction:along_sign",
        late=IN_STEP,
    ),
    # steps are as long as Adam's
    "muon": Optimizer(
        "stretto.optim:muon",
        "adam",
        2,
        7,
        ADAM_RATES,
        0.95,
        "orthogonalise",
        MATRICES,
        gathers=True,
        ahead="stretto.optim.direction:along_update",
        late=IN_STEP,
    ),
    "soap": Optimizer(
        "stretto.optim:SOAP",
        "adam",
        2,
        7,
        ADAM_RATES,
        0.95,
        "rotate",
        MATRICES,
        ahead="stretto.optim.direction:along_soap",
        late=IN_STEP,
    ),
}
OTHERS = (  # of torch.optim, which plans have no figures for
    Optimizer(
        "torch.optim:Muon", whole=MATRICES, late=IN_STEP, unfit="it takes matrices only; 'muon' pairs it with AdamW"
    ),
    Optimizer("torch.optim:LBFGS", whole="all parameters", unfit="it evaluates the loss several times a step"),
    Optimizer("torch.optim:SparseAdam", rows_only=True, unfit="it takes sparse gradients only"),
    Optimizer("torch.optim:Adagrad", rows_only=True),
    *(Optimizer(f"torch.optim:{name}") for name in ("RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop")),
)


def rotated_sides(shape: Sequence[int], *, two_sided: bool) -> tuple[bool, bool]:
    """Whether basis rotation turns the left and the right side of a parameter of this shape."""
    if len(shape) != 2:
        return False, False
    left, right = (1 < length <= LARGEST_BASIS for length in shape)
    return left, right and two_sided


def optimizer_of(name: str) -> Optimizer:
    """An optimizer of the table by its name. Raises UsageError for an unknown one."""
    if not is_among(name, OPTIMIZERS):
        raise UsageError(f"unknown optimizer {shown(name)}: {nearest(str(name), OPTIMIZERS)}")
    return OPTIMIZERS[name]


def stepping_of(optimizer: str | Stepping) -> Stepping:
    """How an optimizer of the table steps. Raises UsageError for an unknown one."""
    stepping = optimizer if isinstance(optimizer, Stepping) else Stepping(optimizer)
    optimizer_of(stepping.name)
    return stepping
