"""The exact partition of layers into stages with the least sum of fills plus largest load, by dynamic programming.

`load[s][i, j]` and `fill[s][i, j]` are the costs of stage s with the layers from i up to j; infinite if its worker's
memory is too small for them. PipeDream's partitioner (Narayanan et al. 2019, section 3.1) minimises the largest load
alone. Tables are [layers + 1, layers + 1] for each stage. As a stage holds at least one layer, stage s of S begins at a
layer from s to L - S + s: only that window of a table is read.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Tables = Sequence[Table]
FEW = 128  # partitions that are compared one by one
SAME = 1e-12  # values with a smaller relative difference count as equal


class Partition(NamedTuple):
    """Stage s holds the layers bounds[s] up to bounds[s + 1]; `value` is the minimised cost."""

    bounds: tuple[int, ...]
    value: float


def few_cuts(layers: int, stages: int) -> list[tuple[int, ...]] | None:
    """The bounds of every partition of the layers into so many stages; None if there are more than FEW."""
    if math.comb(layers - 1, stages - 1) > FEW:
        return None
    return [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]


def partition(load: Tables, fill: Tables | None = None) -> Partition | None:
    """The best partition into one stage for each table; None if no partition has finite loads. Exact.

    Without `fill`, the partition with the least largest load, ties by the sum of squared loads. With `fill`, the least
    sum of fills is found under falling limits of the load. The first limit is the largest load that a better partition
    could have. The search ends once that sum plus the least possible load is no better than the best value.
    """
    least = least_bottleneck(load)
    if least is None:
        return None
    if fill is None:
        most_even = least_sum([np.square(table) for table in load], load, least)
        assert most_even is not None, "a partition with the least bottleneck exists"
        return Partition(most_even.bounds, least)
    least_load = least_sum(fill, load, least)
    least_fill = least_sum(fill, load, np.inf)
    assert least_load is not None, "a partition with the least bottleneck exists"
    assert least_fill is not None, "a partition with the least bottleneck exists"
    best = Partition(least_load.bounds, least_load.value + least)
    limit = best.value - least_fill.value
    while limit > least * (1 + SAME):
        candidate = least_sum(fill, load, limit, strictly=True)
        if candidate is None or candidate.value + least >= best.value * (1 - SAME):
            break
        load_reached = largest(load, candidate.bounds)
        if candidate.value + load_reached < best.value:
            best = Partition(candidate.bounds, candidate.value + load_reached)
        limit = min(load_reached, best.value - least_fill.value)
    return best


def partition_waiting(
    load: Tables, beside_wait: Tables, awaited: Tables, waits: Sequence[bool], *, onward: bool
) -> Partition | None:
    """The partition whose slowest stage takes least, where stages also wait for the stage above them in every turn.

    A stage with waits[s] takes beside_wait[s] plus its wait: awaited[s + 1], plus stage s + 1's own wait if `onward`.
    Exact: the limit of a stage's time falls by bisection while that helps, then to just below the last time found,
    until no partition keeps to it.
    """
    best = within_limit(load, beside_wait, awaited, waits, np.inf, onward=onward)
    if best is None:
        return None
    low = least_bottleneck(load)
    assert low is not None, "a partition is allowed"
    while best.value > low * (1 + SAME):
        middle = (low + best.value) / 2
        candidate = within_limit(load, beside_wait, awaited, waits, middle, onward=onward)
        if candidate is None:
            low = middle
        best = candidate or best
    candidate = best
    while candidate is not None:
        best = candidate
        candidate = within_limit(load, beside_wait, awaited, waits, np.nextafter(best.value, 0), onward=onward)
    return best


def within_limit(
    load: Tables, beside_wait: Tables, awaited: Tables, waits: Sequence[bool], limit: float, *, onward: bool
) -> Partition | None:
    """A partition in which no stage takes longer than the limit; None if there is none.

    Dynamic programming from the last stage to the first: of all partitions of the layers from some layer on, the one
    that the stage below waits for least is enough.
    """
    layers, stages = load[0].shape[0] - 1, len(load)
    width = layers - stages + 1
    if width < 1:
        return None
    wait = np.full(width, np.inf)
    wait[-1] = 0.0
    ends, columns = np.empty((stages, width), dtype=np.intp), np.arange(width)
    for s in reversed(range(stages)):
        window = (slice(s, s + width), slice(s + 1, s + 1 + width))
        own_wait = wait if waits[s] else np.where(wait < np.inf, 0.0, np.inf)
        fits = (
            (load[s][window] < np.inf)
            & (own_wait < np.inf)
            & (np.maximum(load[s][window], beside_wait[s][window] + own_wait) <= limit)
        )
        total = np.where(fits, awaited[s][window] + (own_wait if onward else 0.0), np.inf)
        ends[s] = total.argmin(axis=1)
        wait = total[columns, ends[s]]
    if not wait[0] < np.inf:
        return None
    bounds = [0]
    for s in range(stages):
        bounds.append(s + 1 + int(ends[s][bounds[-1] - s]))
    return Partition(tuple(bounds), slowest_stage(load, beside_wait, awaited, waits, bounds, onward=onward))


def slowest_stage(
    load: Tables, beside_wait: Tables, awaited: Tables, waits: Sequence[bool], bounds: Sequence[int], *, onward: bool
) -> float:
    """The time of the slowest stage of a partition, its wait included."""
    longest = wait = 0.0
    for s in reversed(range(len(load))):
        span = bounds[s], bounds[s + 1]
        own_wait = wait if waits[s] else 0.0
        longest = max(longest, float(load[s][span]), float(beside_wait[s][span]) + own_wait)
        wait = float(awaited[s][span]) + (own_wait if onward else 0.0)
    return longest


def largest(load: Tables, bounds: Sequence[int]) -> float:
    """The largest load of a stage in a partition."""
    return max(float(table[i, j]) for table, i, j in zip(load, bounds[:-1], bounds[1:], strict=True))


def least_bottleneck(load: Tables) -> float | None:
    """The smallest possible largest load; best[j] is it for the first stages on the layers up to j."""
    layers, stages = load[0].shape[0] - 1, len(load)
    width = layers - stages + 1
    if width < 1:
        return None
    best = np.full(width, np.inf)  # the stage before ends at the layers s .. s + width - 1
    best[0] = -np.inf
    for s, table in enumerate(load):
        window = table[s : s + width, s + 1 : s + 1 + width]
        best = np.maximum(best[:, None], window).min(axis=0)
    bottleneck = float(best[-1])
    return bottleneck if bottleneck < np.inf else None


def least_sum(fill: Tables, load: Tables, limit: float, *, strictly: bool = False) -> Partition | None:
    """The partition with the least sum of fills whose loads stay within the limit; None if there is none."""
    layers, stages = load[0].shape[0] - 1, len(load)
    width = layers - stages + 1
    best = np.full(width, np.inf)
    best[0] = 0.0
    choices = np.empty((stages, width), dtype=np.intp)
    columns = np.arange(width)
    for s, (cost, table) in enumerate(zip(fill, load, strict=True)):
        window = (slice(s, s + width), slice(s + 1, s + 1 + width))
        fits = table[window] < limit if strictly else table[window] <= limit
        total = np.where(fits & np.isfinite(table[window]), best[:, None] + cost[window], np.inf)
        choices[s] = total.argmin(axis=0)
        best = total[choices[s], columns]
    if not best[-1] < np.inf:
        return None
    bounds = [layers]
    for s in reversed(range(stages)):
        bounds.append(s + int(choices[s][bounds[-1] - s - 1]))
    return Partition(tuple(reversed(bounds)), float(best[-1]))
