"""Layers to stages: against every partition there is, and as large as it gets."""

import itertools
import sys

import numpy as np
import pytest

from pairwise import slow_where
from stretto.plan.partition import WaitForm, WaitTables, partition, partition_waiting

SEEDS = slow_where(lambda seed: seed > 9, range(60))


def tables(stages, layers, rng, holes=0.1):
    load = rng.integers(1, 50, (stages, layers + 1, layers + 1)).astype(float)
    load[rng.random(load.shape) < holes] = np.inf
    fill = rng.integers(0, 50, load.shape).astype(float)
    load[:, np.tril(np.ones((layers + 1, layers + 1), dtype=bool))] = np.inf
    return list(load), list(fill)


def every(stages, layers):
    return [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), stages - 1)]


def cost(bounds, load, fill):
    pairs = list(itertools.pairwise(bounds))
    loads = [table[pair] for table, pair in zip(load, pairs, strict=True)]
    return max(loads) + (0 if fill is None else sum(t[pair] for t, pair in zip(fill, pairs, strict=True)))


def some(seed):
    """Random numbers, and with the first of them a number of stages and of layers."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 9))
    return rng, int(rng.integers(1, layers + 1)), layers


def assert_best(found, stages, layers, value):
    """Nothing is found if nothing is possible, else what is as good as the best of all."""
    wanted = min(value(bounds) for bounds in every(stages, layers))
    if wanted == np.inf:
        assert found is None
    else:
        assert found is not None
        assert found.value == wanted == value(found.bounds)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_all_partitions(seed, filled):
    rng, stages, layers = some(seed)
    load, fill = tables(stages, layers, rng)
    found = partition(load, fill if filled else None)
    assert_best(found, stages, layers, lambda bounds: cost(bounds, load, fill if filled else None))


def test_a_limit_that_brings_nothing_does_not_end_the_search():
    """The load's limit falls from 21: to a cut of 5 + 20, no better than the first, 20 + 1, and then to 9 + 9."""
    load, fill = np.zeros((2, 6, 6)), np.zeros((2, 6, 6))
    load[0, 0, 1:5], fill[0, 0, 1:5] = [100, 20, 9, 1], [0, 5, 9, 20]
    assert partition(list(load), list(fill)) == ((0, 3, 5), 18)


def longest(bounds, load, before, after, waits, onward):
    """Stage by stage from its definition: what it takes, and what it waits for above it."""
    pairs = list(itertools.pairwise(bounds))

    def given(s):
        if not waits[s]:
            return 0
        return after[s + 1][pairs[s + 1]] + (given(s + 1) if onward else 0)

    return max(max(load[s][pair], before[s][pair] + given(s)) for s, pair in enumerate(pairs))


@pytest.mark.parametrize("onward", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_all_partitions_whose_stages_wait(seed, onward):
    rng, stages, layers = some(seed)
    load, before = tables(stages, layers, rng)
    after = list(rng.integers(0, 50, (stages, layers + 1, layers + 1)).astype(float))
    waits = [*(rng.random(stages - 1) < 0.6).tolist(), False]
    found = partition_waiting(load, list(map(WaitTables, before, after, before)), WaitForm(waits, onward))
    assert_best(found, stages, layers, lambda bounds: longest(bounds, load, before, after, waits, onward))


def longest_of_earlier_turns(bounds, load, own, awaited, transits, delay):
    """Every run of stages above a stage, whose gradients come to it `delay` turns later each."""
    pairs = list(itertools.pairwise(bounds))
    runs = [load[s][pair] for s, pair in enumerate(pairs)]
    for first in range(len(pairs)):
        for last in range(first, len(pairs)):
            seconds = own[first][pairs[first]] + sum(awaited[s][pairs[s]] for s in range(first + 1, last + 1))
            seconds += sum(transits[s][pairs[s]] for s in range(first, last))
            runs.append(seconds / (1 + (last - first) * delay))
    return max(runs)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("seed", slow_where(lambda seed: seed > 4, range(20)))
def test_the_best_of_all_partitions_whose_stages_wait_for_what_is_turns_ago(seed, delay):
    rng, stages, layers = some(seed)
    load, own = tables(stages, layers, rng)
    awaited, transits = (list(rng.integers(0, 90, (stages, layers + 1, layers + 1)).astype(float)) for _ in "at")
    form = WaitForm([True] * (stages - 1) + [False], onward=True, delay=delay)
    found = partition_waiting(load, list(map(WaitTables, own, awaited, transits)), form)
    values = {
        bounds: longest_of_earlier_turns(bounds, load, own, awaited, transits, delay)
        for bounds in every(stages, layers)
    }
    assert (found is None) == (min(values.values()) == np.inf)
    if found is not None:
        assert found.value == pytest.approx(min(values.values()), rel=1e-12)
        assert found.value == pytest.approx(values[found.bounds], rel=1e-12)


def test_more_stages_than_layers():
    none = [np.zeros((3, 3))] * 3
    assert partition(none) is None
    assert partition_waiting(none, [WaitTables(*none)] * 3, WaitForm([False] * 3, onward=True)) is None


def counted(call, *given):
    """What a call returns, and how many functions of Python and of C it has called: its work, on any machine."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return call(*given), calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("filled", [False, True])
def test_a_hundred_layers_on_64_devices_in_little_work(filled):
    """Of 10^27 partitions."""
    load, fill = tables(64, 100, np.random.default_rng(0), holes=0)
    found, calls = counted(partition, load, fill if filled else None)
    assert calls < 50_000
    assert found is not None
    assert len(found.bounds) == 65


def test_stages_that_wait_in_little_work():
    load, before = tables(64, 100, np.random.default_rng(0), holes=0)
    stages = list(map(WaitTables, before, load, load))
    form = WaitForm([s % 4 != 3 for s in range(64)], onward=True)
    found, calls = counted(partition_waiting, load, stages, form)
    assert calls < 50_000
    assert found is not None
