"""Times as sums of what there is to do: how much of each, at rates that are never negative."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Fit:
    """seconds = sum of rates x amounts; `residual` is the root mean square of the relative errors."""

    rates: tuple[float, ...]
    residual: float


def fit(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Rates, none of them negative, with the smallest sum of squared relative errors; a row of amounts a time.

    A rate that the times do not tell apart from the others' is 0; of two that explain them alike the later one stays.
    """
    assert len(amounts) == len(seconds) > 0, "a time for each row of amounts"
    assert min(seconds) > 0, "a measured time is not 0"
    relative = np.asarray(amounts, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1
    width = relative.shape[1]
    best, least = np.zeros(width), 1.0  # all rates 0 are wrong by 100 %
    for size in range(1, width + 1):
        for chosen in reversed(list(combinations(range(width), size))):
            columns = relative[:, chosen] / scale[list(chosen)]
            rates, _, rank, _ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=1e-9)
            error = float(np.sqrt(np.mean((columns @ rates - 1) ** 2)))
            if rank == size and rates.min() >= 0 and error < least * (1 - 1e-9) - 1e-15:
                best, least = np.zeros(width), error
                best[list(chosen)] = rates / scale[list(chosen)]
    return Fit(tuple(float(rate) for rate in best), least)
