"""The optimizers by name: the class, what its state takes, and the learning rates that suit it. No torch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, shown


class Optimizer(NamedTuple):
    """One row of the table.

    `family` is the one whose calibrated rates apply; `states` the numbers of state for each parameter, `accesses` a
    step's memory accesses for each. `rates` are learning rates to compare, for small networks. `momentum` is the
    default of the `--momentum` option: the first beta where there are betas.
    """

    place: str  # module:class
    family: str
    states: int
    accesses: int
    rates: tuple[float, ...]
    momentum: float = 0.9

    @property
    def has_betas(self) -> bool:
        """Whether the class takes betas, and not momentum."""
        return self.family == "adam"


ADAM_RATES = (0.001, 0.003, 0.01)
OPTIMIZERS: Mapping[str, Optimizer] = {
    # with momentum: reads weight, gradient, velocity, writes weight and velocity
    "sgd": Optimizer("torch.optim:SGD", "sgd", 1, 5, (0.003, 0.01, 0.03, 0.1)),
    "lars": Optimizer("stretto.optim:LARS", "sgd", 1, 5, (0.1, 0.3, 1.0, 3.0)),
    "adam": Optimizer("torch.optim:Adam", "adam", 2, 7, ADAM_RATES),
    "adamw": Optimizer("torch.optim:AdamW", "adam", 2, 7, ADAM_RATES),
    # the momentum is that of the paper of `nesterov`
    "nadam": Optimizer("torch.optim:NAdam", "adam", 2, 7, ADAM_RATES, 0.99),
    "lamb": Optimizer("stretto.optim:LAMB", "adam", 2, 7, (0.003, 0.01, 0.03)),
}


MOST_SIDE = 10_000  # a longer side of a matrix is not rotated (a vocabulary's, say), as in SOAP


def rotated_sides(shape: Sequence[int], *, two_sided: bool) -> tuple[bool, bool]:
    """Whether basis rotation turns the left and the right side of a parameter of this shape."""
    if len(shape) != 2:
        return False, False
    left, right = (1 < length <= MOST_SIDE for length in shape)
    return left, right and two_sided


def optimizer_of(name: str) -> Optimizer:
    """An optimizer of the table by its name. Raises UsageError for an unknown one."""
    if not is_among(name, OPTIMIZERS):
        raise UsageError(f"unknown optimizer {shown(name)}: {nearest(str(name), OPTIMIZERS)}")
    return OPTIMIZERS[name]
