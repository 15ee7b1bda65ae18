"""Consecutive layers in so many stages, as even as can be: exact, and without torch."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def partition(costs: Sequence[int], num_stages: int) -> list[int]:
    """Cut layers into stages of at least one layer: stage s holds the layers bounds[s] up to bounds[s + 1].

    Costs are whole numbers, 0 or more. The most expensive stage, which sets a pipeline's pace, is as cheap as can be;
    among those partitions the sum of squared stage costs is least; among those the first cut comes as late as
    possible, then the second, and so on: a layer that costs nothing stays with the layer before it.

    >>> partition([4, 0, 2, 2, 0], 2)
    [0, 2, 5]
    """
    assert 1 <= num_stages <= len(costs), f"{num_stages} stages from {len(costs)} layers"
    assert min(costs) >= 0, f"negative cost {min(costs)}"
    before = list(accumulate(costs, initial=0))
    return most_even(before, num_stages, least_bottleneck(before, num_stages))


def least_bottleneck(before: Sequence[int], num_stages: int) -> int:
    """The least cost that no stage need exceed; before[i] is what layers 0 up to i cost together.

    Bisection over whole numbers: a bottleneck will do if stages filled greedily up to it are few enough. Having fewer
    of them is no obstacle: cutting a stage in two makes none more expensive.
    """
    low, high = max(after - cost for cost, after in pairwise(before)), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(before, num_stages, middle) else (middle + 1, high)
    return low


def fits(before: Sequence[int], num_stages: int, cap: int) -> bool:
    """Whether so many stages, none above `cap`, hold all layers."""
    last = len(before) - 1
    start = 0
    for _ in range(num_stages):
        start = bisect_right(before, before[start] + cap) - 1
        if start == last:
            return True
    return False


def most_even(before: Sequence[int], num_stages: int, cap: int) -> list[int]:
    """The bounds with the least sum of squares among those whose stages stay within `cap`.

    Dynamic programming from the back: least[start] is the sum of squares of the layers from `start` on in as many
    stages as have been added; O(stages x layers^2), in practice far less, for few stages stay within `cap`.
    """
    num_layers = len(before) - 1
    least: list[int | None] = [None] * num_layers + [0]
    choices: list[list[int]] = []
    for rest in range(num_stages):  # stages that follow the one being added
        added: list[int | None] = [None] * (num_layers + 1)
        choice = [num_layers] * num_layers
        for start in range(num_stages - 1 - rest, num_layers - rest):
            best: int | None = None
            for stop in range(start + 1, num_layers - rest + 1):
                cost = before[stop] - before[start]
                if cost > cap:
                    break
                tail = least[stop]
                if tail is not None and (best is None or cost * cost + tail <= best):  # <=: the latest cut wins
                    best, choice[start] = cost * cost + tail, stop
            added[start] = best
        least = added
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds


def cheapest(costs: Sequence[int], between: Sequence[int], num_stages: int, slack: float = 0.1) -> list[int]:
    """As `partition`, but of the partitions about as even as can be the one with the least between its stages.

    `between[i]` is what a cut before layer i costs (bytes that travel), 0 at both ends. No stage costs more than the
    least bottleneck and `slack` of it; then the sum over the cuts is least; then the sum of squared stage costs; then
    the last cut comes as late as possible, then the one before it. By dynamic programming: best[i] is the best way to
    have so many stages of layers 0 up to i.

    >>> cheapest([4, 4, 4, 4], [0, 9, 9, 1, 0], 2, slack=0.5)
    [0, 3, 4]
    """
    assert 1 <= num_stages <= len(costs), f"{num_stages} stages from {len(costs)} layers"
    before = list(accumulate(costs, initial=0))
    limit = least_bottleneck(before, num_stages)
    cap = limit + int(limit * slack)
    best: list[dict[int, tuple[int, int, list[int]]]] = [{0: (0, 0, [0])}]
    for stage in range(1, num_stages + 1):
        found: dict[int, tuple[int, int, list[int]]] = {}
        for stop in range(stage, len(costs) - num_stages + stage + 1):
            ways = []
            for start in range(stop - 1, stage - 2, -1):
                cost = before[stop] - before[start]
                if cost > cap:
                    break
                if start in best[-1]:
                    travels, squares, bounds = best[-1][start]
                    ways.append((travels + between[stop], squares + cost * cost, bounds))
            if ways:
                travels, squares, bounds = min(ways, key=lambda way: way[:2])
                found[stop] = travels, squares, [*bounds, stop]
        best.append(found)
    return best[-1][len(costs)][2]
