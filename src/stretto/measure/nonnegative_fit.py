"""Times as sums of what there is to do: how much of each, at rates that are never negative."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """seconds = sum of rates x amounts; `residual` is the root mean square of the relative errors."""

    rates: tuple[float, ...]
    residual: float


def line(points: Sequence[tuple[float, float]]) -> Fit:
    """The rates a and b of seconds = a + b size, from (size, seconds): the smallest sum of absolute relative errors.

    Sizes that take about as long weigh together as much as one that takes twice as long. So small messages, however
    many were measured, settle a and leave b to the large ones, which need not lie on one line with them. The residual
    is weighted alike.
    """
    times = np.array([seconds for _, seconds in points], dtype=float)
    sizes = np.array([size for size, _ in points], dtype=float)
    assert times.min() > 0, "a measured time is not 0"
    weights = 1 / (np.abs(np.log2(times[:, None] / times)) < 1).sum(axis=1)
    weights /= weights.sum()
    rates = [(a, b) for a, b in candidates(sizes, times) if a >= 0 and b >= 0]
    errors = [np.abs((a + b * sizes) / times - 1) for a, b in rates]
    best = min(range(len(rates)), key=lambda index: float(weights @ errors[index]))
    return Fit(rates[best], float(np.sqrt(weights @ errors[best] ** 2)))


def candidates(sizes: Floats, times: Floats) -> list[tuple[float, float]]:
    """Lines through two of the points, or through one with a single rate: the best of all lines is one of them."""
    lines = [(0.0, float(time / size)) for size, time in zip(sizes, times, strict=True)]
    lines += [(float(time), 0.0) for time in times]
    for one, other in combinations(range(len(sizes)), 2):
        if sizes[one] != sizes[other]:
            slope = float((times[other] - times[one]) / (sizes[other] - sizes[one]))
            lines.append((float(times[one] - slope * sizes[one]), slope))
    return lines


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
