"""The partition of layers into stages where each worker has several: the worker with the largest load has the least.

A worker's load is the sum of its stages', and its stages must fit into its memory together. They are far apart, so that
no order of building a cut up stage by stage finds the best one. A few cuts are compared one by one. Else there are cuts
to begin with, and lower bounds: from numbers of layers (`counted_layers`), which for equal layers between two different
ends is what the best cut has, and from sums. Where they differ, a search over workers (`worker_search`) finds the best,
unless there are too many ways.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

import numpy as np

from stretto.plan.counted_layers import CountedLayers
from stretto.plan.partition import SAME, Partition, few_cuts, least_sum, partition
from stretto.plan.worker_search import WorkerSearch
from stretto.plan.worker_stages import WorkerStages


class Proven(NamedTuple):
    """The best cut that was found, None for none, and a value that none is below; infinite if none fits."""

    best: Partition | None
    least: float


def worker_partition(stages: WorkerStages) -> Proven:
    """The cut of the least value, and what no cut is below: its value, where that is proven."""
    few = few_cuts(stages.layers, stages.stages)
    if few is not None:
        return proven(best_of(map(stages.cut, few)))
    counted = CountedLayers(stages)
    least_used = least_of_used(stages)
    least = counted.least_load + least_used
    if not least < inf:
        return proven(None)
    best = None
    for bounds in first_cuts(stages, counted):
        best = best_of((stages.cut(bounds), *([] if best is None else [best])))
        if best is not None and best.value <= least * (1 + SAME):
            return proven(best)
    least = max(least, mean_load(stages) + least_used)
    best, is_proven = WorkerSearch(stages, counted).improved(best, least_used)
    return proven(best) if is_proven else Proven(best, least)


def proven(best: Partition | None) -> Proven:
    """A cut that no other one is better than; None if there is none that fits."""
    return Proven(best, inf if best is None else best.value)


def best_of(cuts: Iterable[Partition]) -> Partition | None:
    """The first cut of the least value; None if none fits."""
    return min((cut for cut in cuts if cut.value < inf), key=lambda cut: cut.value, default=None)


def first_cuts(stages: WorkerStages, counted: CountedLayers) -> Iterator[tuple[int, ...]]:
    """The bounds of cuts to begin with.

    Of those that give each stage of a worker an equal share of its memory, else of all, the one whose stage of the
    largest load has the least; and the one with the numbers of layers that the bound counts.
    """
    per_worker = stages.stages // stages.workers
    worker_of = {s: worker for worker, own in enumerate(stages.stages_of) for s in own}
    for share in (1 / per_worker, 1.0):
        load = [
            np.where(kept + passing <= share * stages.memory[worker_of[s]], table, inf)
            for s, (table, kept, passing) in enumerate(zip(stages.load, stages.kept, stages.passing, strict=True))
        ]
        chosen = partition(load, stages.used)
        if chosen is not None:
            yield chosen.bounds
            break
    counted_cut = counted.cut()
    if counted_cut is not None:
        yield counted_cut


def least_of_used(stages: WorkerStages) -> float:
    """The least sum of what stages cost beside their worker's load; infinite if no cut is allowed."""
    if stages.used is None:
        return 0.0
    found = least_sum(stages.used, stages.load, inf)
    return inf if found is None else found.value


def mean_load(stages: WorkerStages) -> float:
    """The least mean of the workers' loads, which the largest is no less than."""
    found = least_sum(stages.load, stages.load, inf)
    return inf if found is None else found.value / stages.workers
