"""Divide consecutive layers among stages of even cost. Exact; imports no torch."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def partition(costs: Sequence[int], num_stages: int) -> list[int]:
    """Cut layers into stages of at least one layer: stage s holds the layers bounds[s] up to bounds[s + 1].

    Costs are whole numbers, 0 or more. Of all partitions, the one whose most expensive stage is cheapest, since that
    stage sets a pipeline's pace. Ties go to the least sum of squared stage costs, then to the latest first cut, then to
    the latest second cut, and so on: a layer that costs nothing stays with the layer before it.

    >>> partition([4, 0, 2, 2, 0], 2)
    [0, 2, 5]
    """
    assert 1 <= num_stages <= len(costs), f"{num_stages} stages from {len(costs)} layers"
    assert min(costs) >= 0, f"negative cost {min(costs)}"
    prefix_costs = list(accumulate(costs, initial=0))
    return most_even(prefix_costs, num_stages, least_bottleneck(prefix_costs, num_stages))


def least_bottleneck(prefix_costs: Sequence[int], num_stages: int) -> int:
    """The least possible cost of the most expensive stage; prefix_costs[i] is the cost of layers 0 up to i together.

    Bisection over whole numbers: a bottleneck is enough if stages, filled greedily up to it, hold all layers in at most
    `num_stages`. Fewer are no obstacle: cutting a stage in two makes none more expensive.
    """
    low, high = max(prefix_cost - cost for cost, prefix_cost in pairwise(prefix_costs)), prefix_costs[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(prefix_costs, num_stages, middle) else (middle + 1, high)
    return low


def fits(prefix_costs: Sequence[int], num_stages: int, cap: int) -> bool:
    """Whether `num_stages` stages, none of which costs more than `cap`, hold all layers."""
    last = len(prefix_costs) - 1
    start = 0
    for _ in range(num_stages):
        start = bisect_right(prefix_costs, prefix_costs[start] + cap) - 1
        if start == last:
            return True
    return False


def most_even(prefix_costs: Sequence[int], num_stages: int, cap: int) -> list[int]:
    """The bounds with the least sum of squared stage costs, of those whose stages cost at most `cap`.

    Dynamic programming from the last stage: least[start] is the least sum of squares of the layers from `start` on, in
    as many stages as have been added. O(stages x layers^2); in practice far less, as few stages stay within `cap`.
    """
    num_layers = len(prefix_costs) - 1
    least: list[int | None] = [None] * num_layers + [0]
    choices: list[list[int]] = []
    for num_later in range(num_stages):  # stages after the one being added
        with_stage: list[int | None] = [None] * (num_layers + 1)
        choice = [num_layers] * num_layers
        for start in range(num_stages - 1 - num_later, num_layers - num_later):
            best: int | None = None
            for stop in range(start + 1, num_layers - num_later + 1):
                cost = prefix_costs[stop] - prefix_costs[start]
                if cost > cap:
                    break
                later_squares = least[stop]
                if later_squares is not None and (
                    best is None or cost * cost + later_squares <= best
                ):  # <=: the latest cut wins
                    best, choice[start] = cost * cost + later_squares, stop
            with_stage[start] = best
        least = with_stage
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds


def cheapest(costs: Sequence[int], between: Sequence[int], num_stages: int, slack: float = 0.1) -> list[int]:
    """As `partition`, but of all nearly even partitions the one whose cuts cost least.

    `between[i]` is the cost of a cut before layer i (bytes sent to the next stage), 0 at both ends. No stage costs more
    than 1 + `slack` times the least bottleneck. Of those partitions, the one with the least sum over its cuts; ties go
    to the least sum of squared stage costs, then to the latest last cut, then to the latest cut before it. Dynamic
    programming: best[s][i] is the best way to cut layers 0 up to i into s stages.

    >>> cheapest([4, 4, 4, 4], [0, 9, 9, 1, 0], 2, slack=0.5)
    [0, 3, 4]
    """
    assert 1 <= num_stages <= len(costs), f"{num_stages} stages from {len(costs)} layers"
    prefix_costs = list(accumulate(costs, initial=0))
    bottleneck = least_bottleneck(prefix_costs, num_stages)
    cap = bottleneck + int(bottleneck * slack)
    best: list[dict[int, tuple[int, int, list[int]]]] = [{0: (0, 0, [0])}]
    for stage in range(1, num_stages + 1):
        with_stage: dict[int, tuple[int, int, list[int]]] = {}
        for stop in range(stage, len(costs) - num_stages + stage + 1):
            choices = []
            for start in range(stop - 1, stage - 2, -1):
                cost = prefix_costs[stop] - prefix_costs[start]
                if cost > cap:
                    break
                if start in best[-1]:
                    cut_cost, squares, bounds = best[-1][start]
                    choices.append((cut_cost + between[stop], squares + cost * cost, bounds))
            if choices:
                cut_cost, squares, bounds = min(choices, key=lambda choice: choice[:2])
                with_stage[stop] = cut_cost, squares, [*bounds, stop]
        best.append(with_stage)
    return best[-1][len(costs)][2]
