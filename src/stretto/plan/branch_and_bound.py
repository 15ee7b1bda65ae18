"""Branch and bound: price candidates in the order of their lower bounds until no other can be better."""

import gc
import heapq
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import inf
from typing import NamedTuple

import numpy as np

from stretto.plan.bound import Bounds
from stretto.plan.candidate_costs import Prices
from stretto.plan.closed_forms import Row
from stretto.plan.cuts import best_cut, least_memory
from stretto.plan.method_shape import shape_of
from stretto.plan.objective import Objective, Rates
from stretto.plan.partition import SAME
from stretto.plan.problem import LayerForm, Problem
from stretto.plan.search_space import Candidate, CandidateGroup, MethodChoice, all_groups, alone

Among = Callable[[Candidate], bool]  # which candidates count


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate with its stages' bounds and its predicted costs.

    `formula` is the closed form's seconds of a step. `seconds` is the prediction: by simulation if `simulated`, else
    equal to `formula`. `value` is the objective's, less is better. `bytes` has one entry a worker of the pipeline.
    `money` is the price of a step, and `joules` its energy; None if not known. `rates` say how much `value`, and the
    energy of a step, change with its seconds.
    """

    candidate: Candidate
    bounds: tuple[int, ...]
    formula: float
    seconds: float
    value: float
    bytes: tuple[float, ...]
    money: float | None = None
    joules: float | None = None
    value_per_second: float = 0.0
    waiting_watts: float = 0.0
    simulated: bool = False

    def lasting(self, seconds: float) -> "Plan":
        """The plan if a step takes so many seconds, and its workers wait for longer, or for less time."""
        more = seconds - self.seconds
        return replace(
            self,
            seconds=seconds,
            value=self.value + self.value_per_second * more,
            money=None if self.money is None else self.money * seconds / self.seconds,
            joules=None if self.joules is None else self.joules + self.waiting_watts * more,
        )


@dataclass(frozen=True)
class Found:
    """The best plans, best first; the number of candidates, how many were priced, and the seconds of the search.

    `least` is what the value of no plan is below, `proven` whether the best plan's is no more.
    """

    plans: tuple[Plan, ...]
    candidates: int
    priced: int
    seconds: float
    least: float
    prices: Prices = field(repr=False, compare=False)

    @property
    def proven(self) -> bool:
        """Whether no plan is better than the best; without one, whether none fits."""
        return self.least >= (inf if self.best is None else self.best.value * (1 - SAME))

    @property
    def best(self) -> Plan | None:
        """The best plan; None if none fits."""
        return self.plans[0] if self.plans else None


def search(
    problem: Problem,
    objective: Objective | None = None,
    *,
    keep: int = 1,
    prices: Prices | None = None,
    among: Among | None = None,
    enough: int | None = None,
) -> Found:
    """The `keep` best plans by closed forms (`closed_forms`), each of another candidate; none if nothing fits.

    Only candidates that satisfy `among` are searched. `prices` may come from another problem with the same model and
    cluster. The search leaves out a candidate only if its lower bound, or one of all its alternatives, is worse than
    the last plan kept. So it is exact where each candidate's cut is, which is not always proven where workers have
    several stages (`Found.proven`).
    With `enough`, it stops after pricing that many of the most promising candidates once a plan fits; then the plan may
    not be the best.
    """
    begin = time.perf_counter()
    with paused_collector():
        found = best_plans(problem, objective or Objective(), keep, prices or Prices(problem), among, enough)
    return replace(found, seconds=time.perf_counter() - begin)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Without the collector of cycles: a search makes very many tuples without any, and it would walk through all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def best_plans(
    problem: Problem, aim: Objective, keep: int, prices: Prices, among: Among | None, enough: int | None
) -> Found:
    """What `search` returns, but for its seconds."""
    bounds = Bounds(prices)
    every = list(all_groups(problem))
    if among is not None:
        every = [each for group in every if (each := group.among(among)).choices]
    best: list[tuple[float, tuple[object, ...], Plan]] = []
    number, least_of_all = 0, inf
    for bound, c in in_order(every, aim, prices, bounds):
        if len(best) == keep and (bound > best[-1][0] or (enough is not None and number >= enough)):
            least_of_all = min(least_of_all, bound)
            break
        plan, least = priced(c, aim, prices, best[-1][0] if len(best) == keep else inf)
        number, least_of_all = number + 1, min(least_of_all, max(bound, least))
        if plan is not None:
            best = sorted([*best, (plan.value, c.order, plan)], key=lambda entry: entry[:2])[:keep]
    plans = tuple(plan for _, _, plan in best)
    return Found(plans, sum(group.number for group in every), number, 0.0, least_of_all, prices)


class BoundedEntry(NamedTuple):
    """Candidates whose objective's value is at least `least`; `number` is their place among entries of one bound."""

    least: float
    number: int
    rank: int  # -1: a group by its computing, 0: with communication, 1: alternatives, 2: one, 3: with the tighter bound
    group: CandidateGroup


def in_order(
    every: Iterable[CandidateGroup], aim: Objective, prices: Prices, bounds: Bounds
) -> Iterator[tuple[float, Candidate]]:
    """(lower bound, candidate) of each candidate that could fit, the least bound first."""
    numbers, pricing = count(), Values(aim, prices, bounds)
    fitting = chain.from_iterable(map(bounds.memory.that_fit, every))
    heap = [BoundedEntry(pricing.of_group(group), next(numbers), -1, group) for group in fitting]
    heapq.heapify(heap)

    def push(value: float, number: int, rank: int, group: CandidateGroup) -> None:
        heapq.heappush(heap, BoundedEntry(max(least, value), number, rank, group))

    while heap:
        least, number, rank, group = heapq.heappop(heap)
        if rank == -1:
            push(pricing.of_group(group, communicating=True), number, 0, group)
        elif rank == 0:
            for each in group.alternatives():
                for fit in bounds.memory.that_fit(each, placed=True):
                    push(pricing.of_alternatives(fit), next(numbers), 1, fit)
        elif rank == 1:
            for one in map(alone, group.each()):
                own = least if group.number == 1 else pricing.of_alternatives(one)
                push(own, next(numbers), 2, one)
        elif rank == 3:
            yield least, group.axes
        elif bounds.memory.reaches(group.axes):
            push(pricing.of_candidate(group.axes), number, 3, group)


class Values:
    """Lower bounds of the objective's value."""

    def __init__(self, aim: Objective, prices: Prices, bounds: Bounds) -> None:
        self.aim = aim
        self.prices = prices
        self.bounds = bounds
        self._rates: dict[Hashable, Rates] = {}

    def of_group(self, group: CandidateGroup, *, communicating: bool = False) -> float:
        """Of candidates on the same axes: of their computing alone, without building their places; or of all work."""
        c = group.axes
        if self.aim.goal == "memory":
            return self.bounds.memory.of_group(group)
        if self.aim.goal == "loss" or self.prices.problem.ratios:
            return 0.0
        shards, whole = group.shards, all(self.goes_back_whole(c, choice) for choice in group.choices)
        bound = self.bounds.working if communicating else self.bounds.computing
        least = bound(c, group.forms, whole=whole, shards=shards)
        return least.value(self.aim.rates(c, self.bounds.bill(c)))

    def goes_back_whole(self, axes: Candidate, choice: MethodChoice) -> bool:
        """Whether all stages run a backward as long as a whole one at least, whatever a choice leaves open."""
        shape = shape_of(choice.method, choice.per_worker, axes.pipeline, axes.microbatches, choice.losses)
        return self.bounds.goes_back_whole(shape)

    def of_alternatives(self, group: CandidateGroup) -> float:
        """Of candidates that differ in what is recomputed, and in whether the sequence is divided."""
        c, forms = group.axes, group.forms
        if self.aim.goal == "memory":
            return self.bounds.memory.of_group(group)
        return self.of_seconds(c, self.bounds.seconds(c, forms), forms)

    def of_candidate(self, c: Candidate) -> float:
        """A tighter bound of one candidate."""
        if self.aim.goal == "memory":
            return self.bounds.memory.of_candidate(c)
        return self.of_seconds(c, self.bounds.tighter(c))

    def of_seconds(self, c: Candidate, seconds: float, forms: tuple[LayerForm, ...] = ()) -> float:
        """Of a candidate whose step takes so many seconds at least; with `forms`, with its layers run in any."""
        return self.prices.correction(c) * self.bounds.value(c, self.rates(c), seconds, forms)

    def rates(self, c: Candidate) -> Rates:
        """The objective's rates, which depend on a candidate's axes unless steps to a loss count."""
        key = c if self.aim.goal == "loss" else (c.pipeline, c.mesh, c.batch, c.placement)
        if key not in self._rates:
            self._rates[key] = self.aim.rates(c, self.prices.places_of(c))
        return self._rates[key]


def plan_of(c: Candidate, aim: Objective, prices: Prices) -> Plan | None:
    """The best plan of a candidate: its layers divided among stages by the objective; None if none fits."""
    return priced(c, aim, prices)[0]


def priced(c: Candidate, aim: Objective, prices: Prices, most: float = inf) -> tuple[Plan | None, float]:
    """The best plan of a candidate that was found, None if none fits; and what no other of its plans is below.

    A plan of least memory that needs more than `most` bytes is left out.
    """
    places, rows = prices.places_of(c), prices.tables(c)
    memory: Sequence[float] = places.memory
    if aim.goal == "memory":
        fullest = least_memory(c, rows)
        if fullest.best is None or fullest.best.value > most:
            return None, fullest.least
        limit = fullest.best.value
        rows = [row._replace(load=np.where(row.bytes <= limit, row.load, inf)) for row in rows]
        memory = [min(each, limit) for each in memory]
    cut = best_cut(c, rows, aim.rates(c, places), memory)
    least = fullest.least if aim.goal == "memory" else prices.correction(c) * cut.least
    return None if cut.bounds is None else planned(c, cut.bounds, cut.seconds, rows, aim, prices), least


def bytes_of_workers(c: Candidate, bounds: tuple[int, ...], rows: list[Row]) -> list[float]:
    """The bytes on each worker of the pipeline."""
    kept, passing = [0.0] * c.pipeline, [0.0] * c.pipeline
    for s, row in enumerate(rows):
        worker, span = c.worker_of(s), (bounds[s], bounds[s + 1])
        kept[worker] += float(row.kept[span])
        passing[worker] = max(passing[worker], float(row.passing[span]))
    return [one + other for one, other in zip(kept, passing, strict=True)]


def planned(
    c: Candidate, bounds: tuple[int, ...], seconds: float, rows: list[Row], aim: Objective, prices: Prices
) -> Plan:
    """The plan of a candidate with these bounds, and its costs."""
    worker_bytes, places, correction = bytes_of_workers(c, bounds, rows), prices.places_of(c), prices.correction(c)
    busy = [correction * each for each in busy_of_workers(c, bounds, rows)]
    rates, price, power, seconds = aim.rates(c, places), places.price, places.power, seconds * correction
    value = rates.step * seconds + products(rates.busy, busy)
    return Plan(
        candidate=c,
        bounds=bounds,
        formula=seconds,
        seconds=seconds,
        bytes=tuple(worker_bytes),
        value=max(worker_bytes) if aim.goal == "memory" else value,
        value_per_second=rates.step,
        money=None if price is None else price / 3600 * seconds,
        joules=None if power is None else power.waiting * seconds + products(power.more, busy),
        waiting_watts=0.0 if power is None else power.waiting,
    )


def busy_of_workers(c: Candidate, bounds: tuple[int, ...], rows: list[Row]) -> list[float]:
    """The seconds of a step in which each worker of the pipeline is busy."""
    busy = [0.0] * c.pipeline
    for s, row in enumerate(rows):
        busy[c.worker_of(s)] += float(row.busy[bounds[s], bounds[s + 1]])
    return busy


def products(factors: Sequence[float], values: Sequence[float]) -> float:
    """The sum of factors times values; 0 without factors."""
    return sum(factor * value for factor, value in zip(factors, values, strict=True)) if factors else 0.0
