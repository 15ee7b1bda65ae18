"""Tables over ranges of layers: at [i, j] the value of the layers [i, j)."""

import numpy as np
from numpy.typing import NDArray

from stretto.plan.places import Numbers

Table = NDArray[np.float64]


def running_sums(values: Numbers) -> Numbers:
    """The sum of the values before i, at i."""
    return np.concatenate([[0.0], np.cumsum(values)])


def range_sums(values: Numbers) -> Table:
    """The sum of the values [i, j), at [i, j]."""
    sums = running_sums(values)
    table: Table = sums[None, :] - sums[:, None]
    return table


def range_max(values: Numbers) -> Table:
    """The largest of the values [i, j), at [i, j]."""
    layers = len(values)
    table = np.zeros((layers + 1, layers + 1))
    for i in range(layers):
        table[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return table
