"""Cuts where workers have several stages, against every cut there is, on whole numbers."""

import random
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from pairwise import slow_where
from stretto.plan import worker_partition as module
from stretto.plan import worker_search
from stretto.plan.counted_layers import CountedLayers
from stretto.plan.worker_partition import worker_partition
from stretto.plan.worker_stages import WorkerStages


def drawn(seed, layers, workers, loops, *, used=False, top=False, equal=False):
    """Stages as the planner has them: `loops` of them on each worker, in a V for 0; tables of whole numbers."""
    dice, in_v = random.Random(seed), loops == 0
    stages = workers * (loops or 2)
    work = [dice.randint(1, 9) for _ in range(layers)]
    if equal:
        work = [1, *[6] * (layers - 2), dice.randint(1, 9)]
    weights = [4, *[1] * (layers - 2), 4] if equal else [dice.randint(0, 6) for _ in range(layers)]

    def table(entry):
        return np.array([[float(entry(i, j)) if i < j else inf for j in range(layers + 1)] for i in range(layers + 1)])

    def sums(values, fixed, times):
        before = np.cumsum([0, *values])
        sums = fixed + times * np.subtract.outer(before, before).T.astype(float)
        return np.where(np.triu(np.ones(sums.shape), 1) > 0, sums, inf)

    load = [sums(work, 0 if equal else dice.randint(0, 4), 1) for _ in range(stages)]
    kept = [sums(weights, 0, 2 if equal else dice.randint(1, 3)) for _ in range(stages)]
    passing = [table(lambda i, j: max(weights[i:j]))] * stages
    room = 2 * (layers // workers + 4) + 4 if equal else sum(weights) / workers * dice.choice([2, 3, 4, 9])
    some = [table(lambda i, j: dice.randint(0, 9)) for _ in range(stages)] if used else None
    return WorkerStages(
        load=load, top=passing if top else None, used=some, kept=kept, passing=passing,
        memory=[float(int(room))] * workers, in_v=in_v,
    )  # fmt: skip


def every_cut(n):
    """The value of every cut that fits."""
    layers, stages, workers = len(n.load[0]) - 1, len(n.load), len(n.memory)
    for inner in combinations(range(1, layers), stages - 1):
        spans, loads = list(pairwise((0, *inner, layers))), []
        for w in range(workers):
            own = [s for s in range(stages) if (min(s, stages - 1 - s) if n.in_v else s % workers) == w]
            if sum(n.kept[s][spans[s]] for s in own) + max(n.passing[s][spans[s]] for s in own) <= n.memory[w]:
                loads.append(sum(n.load[s][spans[s]] for s in own))
                loads[-1] += max(n.top[s][spans[s]] for s in own) if n.top else 0
        if len(loads) == workers:
            yield max(loads) + sum(n.used[s][spans[s]] for s in range(stages) if n.used)


SHAPES = [(9, 2, 2), (9, 3, 2), (9, 2, 3), (9, 3, 0), (10, 4, 0), (8, 2, 0)]  # layers, workers, loops


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", slow_where(lambda seed: seed not in (2, 3, 4), range(6)))
def test_the_best_cut_of_all(seed, shape, monkeypatch):
    monkeypatch.setattr(module, "few_cuts", lambda layers, stages: None)
    n = drawn(seed, *shape, used=seed % 3 == 1, top=seed % 3 == 2)
    found, least = worker_partition(n), min(every_cut(n), default=inf)
    assert found.least == least
    assert least == inf if found.best is None else found.best.value == least == n.cut(found.best.bounds).value


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_where_too_many_ways_are_given_up(shape, monkeypatch):
    monkeypatch.setattr(module, "few_cuts", lambda layers, stages: None)
    monkeypatch.setattr(worker_search, "MOST_WAYS", 0)
    unproven = 0
    for seed in range(8):
        n = drawn(seed, *shape, used=seed % 2 == 1)
        found, least = worker_partition(n), min(every_cut(n), default=inf)
        assert found.least <= least
        assert found.best is None or found.best.value >= least
        unproven += found.best is None or found.best.value > found.least
    assert unproven


@pytest.mark.parametrize("shape", [(98, 16, 0), (98, 8, 2), (98, 8, 12), (98, 32, 3), (130, 8, 4)])
def test_equal_layers_between_two_ends_are_proven_by_their_number(shape, monkeypatch):
    """As many as a large language model has, of which no search could look at every cut."""
    monkeypatch.setattr(worker_search, "MOST_WAYS", 0)
    n = drawn(0, *shape, equal=True)
    found, counted = worker_partition(n), CountedLayers(n)
    assert found.best is not None
    assert found.best.value == found.least == counted.least_load
