"""The exact partition of layers into stages with the least sum of fills plus largest load, by dynamic programming.

`load[s][i, j]` and `fill[s][i, j]` are the costs of stage s with the layers from i up to j; infinite if its worker's
memory is too small for them. PipeDream's partitioner (Narayanan et al. 2019, section 3.1) minimises the largest load
alone. Tables are [layers + 1, layers + 1] for each stage. As a stage holds at least one layer, stage s of S begins at a
layer from s to L - S + s: only that window of a table is read.
"""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from stretto.cost.layer_sums import Table

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


class WaitTables(NamedTuple):
    """The seconds of a stage that may wait for the one above it: its own, those that the stage below waits for it, and
    those of the messages to and from the stage above.
    """

    beside: Table
    awaited: Table
    transits: Table


class WaitForm(NamedTuple):
    """How stages wait for the stage above them in every turn: those with waits[s].

    Without `delay` stage s takes its own seconds and its wait: the awaited ones of stage s + 1, plus the wait of that
    if `onward`. With it, what it waits for is of so many turns ago: of stages s, s + 1, ... s + k the turns take at
    least (own seconds of s + awaited ones of the others + the transits between them) / (1 + k delay).
    """

    waits: Sequence[bool]
    onward: bool = False
    delay: int = 0

    def longest(self, stages: Sequence[tuple[float, ...]]) -> float:
        """The seconds from one turn to the next, by the entries of each stage's `WaitTables`."""
        if self.delay:
            return max(map(self._longest_from, range(len(stages)), [stages] * len(stages)))
        longest = wait = 0.0
        for (beside, awaited, _), waits in reversed(list(zip(stages, self.waits, strict=True))):
            own_wait = wait if waits else 0.0
            longest = max(longest, beside + own_wait)
            wait = awaited + (own_wait if self.onward else 0.0)
        return longest

    def _longest_from(self, first: int, stages: Sequence[tuple[float, ...]]) -> float:
        total = longest = stages[first][0]
        for turns, stage in enumerate(range(first, len(stages) - 1), start=1):
            if not self.waits[stage]:
                break
            total += stages[stage][2] + stages[stage + 1][1]
            longest = max(longest, total / (1 + turns * self.delay))
        return longest


def partition_waiting(load: Tables, stages: Sequence[WaitTables], form: WaitForm) -> Partition | None:
    """The partition whose slowest stage takes least, where stages also wait for the stage above them in every turn.

    Exact: the limit of a stage's time falls by bisection while that helps, then to just below the last time found,
    until no partition keeps to it.
    """
    best = within_limit(load, stages, form, np.inf)
    if best is None:
        return None
    low = least_bottleneck(load)
    assert low is not None, "a partition is allowed"
    while best.value > low * (1 + SAME):
        middle = (low + best.value) / 2
        candidate = within_limit(load, stages, form, middle)
        if candidate is None:
            low = middle
        best = candidate or best
    while True:
        candidate = within_limit(load, stages, form, np.nextafter(best.value, 0))
        if candidate is None or candidate.value >= best.value:  # sums in another order may differ in the last bit
            return best
        best = candidate


def within_limit(load: Tables, stages: Sequence[WaitTables], form: WaitForm, limit: float) -> Partition | None:
    """A partition in which no stage takes longer than the limit; None if there is none.

    Dynamic programming from the last stage to the first: of all partitions of the layers from some layer on, the one
    that the stage below waits for least is enough.
    """
    layers, number = load[0].shape[0] - 1, len(load)
    width = layers - number + 1
    if width < 1:
        return None
    wait = np.full(width, np.inf)
    wait[-1] = 0.0
    ends, columns = np.empty((number, width), dtype=np.intp), np.arange(width)
    for s in reversed(range(number)):
        window = (slice(s, s + width), slice(s + 1, s + 1 + width))
        reached = wait < np.inf
        own_wait = np.where(reached, wait, 0.0) if form.waits[s] else np.zeros(width)
        if form.delay and form.waits[s]:
            own_wait = np.maximum(0.0, own_wait + stages[s].transits[window] - form.delay * limit)
        fits = (
            (load[s][window] < np.inf)
            & reached
            & (np.maximum(load[s][window], stages[s].beside[window] + own_wait) <= limit)
        )
        total = np.where(fits, stages[s].awaited[window] + (own_wait if form.onward else 0.0), np.inf)
        ends[s] = total.argmin(axis=1)
        wait = total[columns, ends[s]]
    if not wait[0] < np.inf:
        return None
    bounds = [0]
    for s in range(number):
        bounds.append(s + 1 + int(ends[s][bounds[-1] - s]))
    spans = list(pairwise(bounds))
    entries = [tuple(float(table[span]) for table in tables) for tables, span in zip(stages, spans, strict=True)]
    return Partition(tuple(bounds), max(largest(load, bounds), form.longest(entries)))


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
