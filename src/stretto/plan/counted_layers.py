"""A lower bound of the largest load of a worker with several stages, from numbers of layers alone.

`least[n]` of a stage is its least load with n layers, wherever they lie between the ends; that of a worker is the
convolution of its stages'. All workers together must take all layers. For equal layers between two different ends, as
in a language model, the bound is what the best cut has, and `cut` is such a cut.
"""

from collections.abc import Hashable, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from stretto.cost.layer_sums import Numbers
from stretto.plan.partition import SAME
from stretto.plan.worker_stages import WorkerStages

Counts = NDArray[np.intp]


class OfWorker(NamedTuple):
    """The least load of a worker with n layers, at n; the split of n among its stages, the last one's first."""

    least: Numbers
    last: tuple[Counts, ...]  # for each stage but the first, its layers if the stages up to it have n


class CountedLayers:
    """The bound for a cut of layers into stages, of which workers have several each."""

    def __init__(self, stages: WorkerStages) -> None:
        self.stages = stages
        self._of_stage: dict[Hashable, Numbers] = {}
        known: dict[Hashable, OfWorker] = {}
        self.of_workers: list[OfWorker] = []
        for worker, own in enumerate(stages.stages_of):
            key = (stages.memory[worker], *(self.key(s) for s in own))
            if key not in known:
                known[key] = self.of_worker(worker)
            self.of_workers.append(known[key])

    def key(self, stage: int) -> Hashable:
        """Equal for stages with the same tables and the same ends."""
        costs, last = self.stages, self.stages.stages - 1
        tables = costs.load, costs.kept, costs.passing, *([costs.top] if costs.top else [])
        return (*(id(table[stage]) for table in tables), stage == 0, stage == last)

    def of_worker(self, worker: int) -> OfWorker:
        """The least loads of a worker by its number of layers; infinite where these need more than its memory."""
        tables, own = self.stages, self.stages.stages_of[worker]
        load, last = convolved([self.by_count(s, tables.load[s]) for s in own])
        kept = least_sums([self.by_count(s, tables.kept[s]) for s in own])
        passing = least_largest([self.by_count(s, tables.passing[s]) for s in own])
        top = least_largest([self.by_count(s, tables.top[s]) for s in own]) if tables.top else 0.0
        return OfWorker(np.where(kept + passing <= tables.memory[worker], load + top, inf), last)

    def by_count(self, stage: int, table: Numbers) -> Numbers:
        """The least of a stage's table with n layers, at n: the first stage begins, the last one ends the network."""
        first, last = stage == 0, stage == self.stages.stages - 1
        key = id(table), first, last
        if key not in self._of_stage:
            self._of_stage[key] = least_by_count(table, self.stages.layers - self.stages.stages + 1, first, last)
        return self._of_stage[key]

    @cached_property
    def most(self) -> list[Numbers]:
        """The least load of a worker with n layers or more, at n."""
        return [np.minimum.accumulate(each.least[::-1])[::-1] for each in self.of_workers]

    @cached_property
    def least_load(self) -> float:
        """No cut has a worker of the largest load that has less; infinite if none fits."""
        loads = np.unique(np.concatenate(self.most))
        loads = loads[loads < inf]
        low, high = 0, len(loads)
        while low < high:
            middle = (low + high) // 2
            capacities = self.capacities(float(loads[middle]))
            if min(capacities) > 0 and sum(capacities) >= self.stages.layers:
                high = middle
            else:
                low = middle + 1
        return float(loads[low]) if low < len(loads) else inf

    def capacities(self, load: float, *, strictly: bool = False) -> list[int]:
        """The most layers of each worker with at most so much load; 0 if it can have none."""
        limit = np.nextafter(load, -inf) if strictly else load
        return [max(0, int(np.searchsorted(least, limit, side="right")) - 1) for least in self.most]

    def cut(self) -> tuple[int, ...] | None:
        """The bounds of a cut whose workers have no more layers than the bound gives them; None if there is none."""
        if not self.least_load < inf:
            return None
        counts = self.capacities(self.least_load)
        more = sum(counts) - self.stages.layers
        while more:
            fullest = max(range(len(counts)), key=lambda w: (counts[w] and self.of_workers[w].least[counts[w]], w))
            counts[fullest] -= 1
            more -= 1
        lengths = [0] * self.stages.stages
        for worker, count in enumerate(counts):
            if not self.of_workers[worker].least[count] < inf:
                return None
            for stage, length in zip(self.stages.stages_of[worker], self.split(worker, count), strict=True):
                lengths[stage] = length
        return tuple(int(bound) for bound in np.cumsum([0, *lengths]))

    def split(self, worker: int, count: int) -> list[int]:
        """The layers of each stage of a worker that has so many, for the least load."""
        lengths: list[int] = []
        for last in reversed(self.of_workers[worker].last):
            lengths.append(int(last[count]))
            count -= lengths[-1]
        return [count, *reversed(lengths)]


def least_by_count(table: Numbers, most: int, first: bool, last: bool) -> Numbers:
    """The least of the entries [i, i + n] of a table, at n from 0 to `most`; without the ends but those that it has."""
    layers, least = len(table) - 1, np.full(most + 1, inf)
    if first or last:
        entries = table[0, 1 : most + 1] if first else table[layers - np.arange(1, most + 1), layers]
        least[1:] = table[0, layers] if first and last else entries
        return least
    longest = min(most, layers - 2)
    if longest > 0:
        # Row i - 1 has the entries [i, i + n] of an inner stage, at n - 1; infinite beyond the last layer but one.
        inner = np.concatenate([table[1:-2, 2:-1], np.full((layers - 2, longest - 1), inf)], axis=1)
        rows, step = inner.shape[0], inner.strides[0] + inner.strides[1]
        least[1 : longest + 1] = as_strided(inner, (rows, longest), (step, inner.strides[1])).min(axis=0)
    return least


def by_last(total: Numbers, count: int) -> Numbers:
    """At [n, k], the entry of some stages with n - k layers, where one more stage has k; infinite where none have."""
    missing = np.full(count - 1, inf)
    return sliding_window_view(np.concatenate([missing, total, missing]), count)[:, ::-1]


def convolved(stages: Sequence[Numbers]) -> tuple[Numbers, tuple[Counts, ...]]:
    """The least sums of several stages with n layers in all, at n, and for each further stage its layers.

    Of equal sums that of the most even numbers of layers.
    """
    total, uneven = stages[0], np.square(np.arange(len(stages[0]), dtype=float))
    lengths = []
    for stage in stages[1:]:
        sums = by_last(total, len(stage)) + stage
        total = sums.min(axis=1)
        equal = (sums <= (total * (1 + SAME))[:, None]) & np.isfinite(sums)
        squares = by_last(uneven, len(stage)) + np.square(np.arange(len(stage), dtype=float))
        chosen = np.where(equal, squares, inf).argmin(axis=1)
        uneven = squares[np.arange(len(chosen)), chosen]
        lengths.append(chosen)
    return total, tuple(lengths)


def least_sums(stages: Sequence[Numbers]) -> Numbers:
    """The least sums of several stages with n layers in all, at n."""
    total = stages[0]
    for stage in stages[1:]:
        total = (by_last(total, len(stage)) + stage).min(axis=1)
    return total


def least_largest(stages: Sequence[Numbers]) -> Numbers:
    """The least that the largest of several stages comes to, with n layers in all, at n."""
    largest = stages[0]
    for stage in stages[1:]:
        largest = np.maximum(by_last(largest, len(stage)), stage).min(axis=1)
    return largest
