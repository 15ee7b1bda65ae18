"""The best plan of all candidates: in the order of their lower bounds, until none that is left could be better."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from stretto.plan.bound import Bounds
from stretto.plan.candidate_costs import Prices, Row
from stretto.plan.objective import Objective
from stretto.plan.problem import Problem
from stretto.plan.search_space import Candidate, candidates


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate, where its layers are cut, and what is predicted: seconds of a step, bytes of each worker.

    `formula` is what the closed form says of the step, `seconds` what is predicted: by simulation if `simulated`.
    `value` is what the objective makes of the seconds; less is better. `money` is of a step.
    """

    candidate: Candidate
    bounds: tuple[int, ...]
    formula: float
    seconds: float
    value: float
    bytes: tuple[float, ...]
    money: float | None = None
    simulated: bool = False


@dataclass(frozen=True)
class Found:
    """The best plans, best first; how many candidates there were, how many were priced, and how long that took."""

    plans: tuple[Plan, ...]
    candidates: int
    priced: int
    seconds: float
    prices: Prices = field(repr=False, compare=False)

    @property
    def best(self) -> Plan | None:
        """The first, if any fits."""
        return self.plans[0] if self.plans else None


def search(
    problem: Problem, objective: Objective | None = None, *, keep: int = 1, prices: Prices | None = None,
    among: Callable[[Candidate], bool] = lambda c: True, enough: int | None = None,
) -> Found:  # fmt: skip
    """The `keep` best plans by the closed forms of `price`, each of another candidate; none if nothing fits.

    `among` says which candidates there are; `prices` may be those of the same model and cluster in another problem.
    With `enough` no more than so many are priced once one fits, the most promising ones: then it may not be the best.
    Else exact: a candidate is left out only if its lower bound is worse than the last plan that is kept.
    """
    begin = time.perf_counter()
    aim, prices = objective or Objective(), prices or Prices(problem)
    bounds = Bounds(prices)
    every = [c for c in candidates(problem) if among(c)]
    found: list[tuple[float, tuple[object, ...], Plan]] = []
    priced = 0
    for least, c in in_order(every, aim, prices, bounds):
        if len(found) == keep and (least > found[-1][0] or (enough is not None and priced >= enough)):
            break
        plan = plan_of(c, aim, prices)
        priced += 1
        if plan is not None:
            found = sorted([*found, (plan.value, c.order, plan)], key=lambda each: each[:2])[:keep]
    return Found(tuple(plan for _, _, plan in found), len(every), priced, time.perf_counter() - begin, prices)


def in_order(
    every: Iterable[Candidate], aim: Objective, prices: Prices, bounds: Bounds
) -> Iterator[tuple[float, Candidate]]:
    """Candidates whose weights could fit, the most promising first, each with its lower bound."""
    heap: list[tuple[float, int, bool, Candidate]] = []
    for index, c in enumerate(every):
        if bounds.fits(c):
            room = bounds.bytes(c) / c.pipeline
            least = room if aim.goal == "memory" else bounds.seconds(c) * aim.factor(c, prices.where(c).price)
            heap.append((least, index, aim.goal == "memory", c))
    heapq.heapify(heap)
    while heap:
        least, index, sure, c = heapq.heappop(heap)
        if sure:
            yield least, c
        elif bounds.reaches(c):
            tighter = bounds.tighter(c) * aim.factor(c, prices.where(c).price)
            heapq.heappush(heap, (max(least, tighter), index, True, c))


def plan_of(c: Candidate, aim: Objective, prices: Prices) -> Plan | None:
    """The best way to cut the layers of a candidate; None if none fits."""
    rows = prices.tables(c)
    if aim.goal == "memory":
        rows = within_least(c, prices, rows)
    cut = prices.cut(c, rows)
    return None if cut is None else planned(c, cut.bounds, cut.value, rows, aim, prices)


def within_least(c: Candidate, prices: Prices, rows: list[Row]) -> list[Row]:
    """Loads that are finite only where the worker that takes most takes as little as can be."""
    import numpy as np

    least = prices.least_memory(rows)
    limit = float("-inf") if least is None else least.value
    return [row._replace(load=np.where(row.bytes <= limit, row.load, np.inf)) for row in rows]


def planned(
    c: Candidate, bounds: tuple[int, ...], seconds: float, rows: list[Row], aim: Objective, prices: Prices
) -> Plan:
    """The plan with everything that is told of it."""
    taken = [0.0] * c.pipeline
    for s, row in enumerate(rows):
        taken[c.home(s)] += float(row.bytes[bounds[s], bounds[s + 1]])
    price = prices.where(c).price
    value = max(taken) if aim.goal == "memory" else seconds * aim.factor(c, price)
    return Plan(
        candidate=c, bounds=bounds, formula=seconds, seconds=seconds, value=value, bytes=tuple(taken),
        money=None if price is None else price / 3600 * seconds,
    )  # fmt: skip
