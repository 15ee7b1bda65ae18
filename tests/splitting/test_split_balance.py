import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.splitting.balance import cheapest, partition


def all_bounds(num_layers: int, num_stages: int) -> list[list[int]]:
    return [[0, *cuts, num_layers] for cuts in combinations(range(1, num_layers), num_stages - 1)]


def by_brute_force(costs: list[int], num_stages: int) -> list[int]:
    def rank(bounds: list[int]) -> tuple[int, int, list[int]]:
        stages = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
        return max(stages), sum(cost * cost for cost in stages), [-cut for cut in bounds]

    return min(all_bounds(len(costs), num_stages), key=rank)


@given(st.data(), st.lists(st.integers(0, 6) | st.integers(0, 10**17), min_size=1, max_size=9))
def test_is_the_best_of_all_partitions(data, costs):
    num_stages = data.draw(st.integers(1, len(costs)))
    assert partition(costs, num_stages) == by_brute_force(costs, num_stages)


@pytest.mark.parametrize(
    ("costs", "bounds"),
    [
        ([5, 0, 5, 0], [0, 2, 4]),  # a ReLU stays with the layer before it
        ([0, 5, 0, 0, 5], [0, 4, 5]),
        ([1, 1, 1], [0, 2, 3]),
        ([0, 0, 0], [0, 2, 3]),
        ([9, 1, 1, 1], [0, 1, 4]),
        ([7], [0, 1]),
    ],
)
def test_pictures(costs, bounds):
    assert partition(costs, len(bounds) - 1) == bounds


@given(st.lists(st.integers(1, 50), min_size=2, max_size=40), st.integers(1, 8))
def test_a_free_layer_never_begins_a_stage(costs, num_stages):
    with_free = [cost for pair in zip(costs, [0] * len(costs), strict=True) for cost in pair]
    bounds = partition(with_free, min(num_stages, len(costs)))
    assert all(bound % 2 == 0 for bound in bounds)


@pytest.mark.parametrize("shape", ["even", "ramp", "one giant", "free"])
def test_200_layers_in_64_stages_take_no_time(shape):
    costs = {
        "even": [10**9 + 7 * i % 13 for i in range(200)],
        "ramp": [i * 10**6 for i in range(200)],
        "one giant": [10**3 + i % 17 for i in range(199)] + [10**12],
        "free": [0] * 200,
    }[shape]
    start = time.process_time()
    bounds = partition(costs, 64)
    assert time.process_time() - start < 2
    assert len(bounds) == 65
    assert all(start < stop for start, stop in pairwise(bounds))


def cheapest_by_brute_force(costs: list[int], between: list[int], num_stages: int, slack: float) -> list[int]:
    ways = all_bounds(len(costs), num_stages)
    stages = {tuple(bounds): [sum(costs[start:stop]) for start, stop in pairwise(bounds)] for bounds in ways}
    least = min(max(each) for each in stages.values())

    def rank(bounds: list[int]) -> tuple[int, int, list[int]]:
        squares = sum(cost * cost for cost in stages[tuple(bounds)])
        return sum(between[bound] for bound in bounds), squares, [-cut for cut in reversed(bounds)]

    return min((each for each in ways if max(stages[tuple(each)]) <= least + int(least * slack)), key=rank)


@given(st.data(), st.lists(st.integers(0, 20), min_size=1, max_size=9), st.sampled_from([0.0, 0.1, 0.5]))
def test_cheapest_is_the_cheapest_of_the_even_partitions(data, costs, slack):
    num_stages = data.draw(st.integers(1, len(costs)))
    between = [0, *(data.draw(st.integers(0, 5)) for _ in costs[1:]), 0]
    assert cheapest(costs, between, num_stages, slack) == cheapest_by_brute_force(costs, between, num_stages, slack)


def test_400_pieces_in_32_stages_take_no_time():
    costs, between = [10**9 + 7 * i % 13 for i in range(400)], [1 + i * 37 % 101 for i in range(401)]
    start = time.process_time()
    assert len(cheapest(costs, between, 32)) == 33
    assert time.process_time() - start < 2
