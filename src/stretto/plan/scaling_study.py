"""Throughput by number of workers and utilisation by batch size: the best plan of each way of training at each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from stretto.cost.attained import dtype_of_products
from stretto.errors import UsageError
from stretto.plan.branch_and_bound import Plan, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.explain import grow
from stretto.plan.objective import Objective
from stretto.plan.problem import Problem
from stretto.plan.refine import refined
from stretto.plan.reliability import Goodput, Reliability, goodput_of

Value = TypeVar("Value")
ENOUGH = 12  # candidates priced for each method: on thousands of workers, hundreds have about the same bound
BATCHES = (-4, -2, 0, 2, 4)  # exponents of 2 that the batch is multiplied by


WAYS = ("hybrid", "data parallel", "pipeline")


def limited_to(way: str, problem: Problem) -> Problem:
    """The problem of a way of training, without any choice if its limits rule that out.

    Hybrid plans may combine all axes, the others have stages on one device each: data parallel the whole model on every
    worker; of pipelines `best` keeps those with a single replica.
    """

    def only(limit: Sequence[Value] | None, value: Value) -> tuple[Value, ...]:
        return (value,) if limit is None or value in limit else ()  # None lists all

    if way == "hybrid":
        return problem
    whole = problem.but(tensors=only(problem.tensors, 1), spaces=only(problem.spaces, (1, 1)))
    return whole if way == "pipeline" else whole.but(stages=only(problem.stages, 1))


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The best plan of a way of training for a number of workers and a batch size; None if none fits.

    `efficiency` is the throughput a worker, over that of the fewest workers on which a hybrid plan fits. `utilisation`
    is the FLOPs of forwards and backwards over the peak FLOPs of all workers in that time. `goodput` is what failures
    leave of the time; None if not known.
    """

    way: str
    workers: int
    batch: int
    plan: Plan | None
    efficiency: float | None = None
    utilisation: float | None = None
    goodput: Goodput | None = None

    @property
    def examples_per_second(self) -> float | None:
        """Throughput while nothing fails; None without a plan."""
        return None if self.plan is None else self.plan.candidate.batch / self.plan.seconds

    @property
    def useful_per_second(self) -> float:
        """Examples a second that are not lost to failures, where those are known; 0 without a plan."""
        return (self.examples_per_second or 0.0) * (1.0 if self.goodput is None else self.goodput.share)


def scaling(
    problem: Problem, numbers: Sequence[int], *, per_worker: bool = False, known: Reliability | None = None
) -> list[Scaled]:
    """The best plan of each way on each number of workers, on the cluster with as many nodes added as needed.

    As few plans divide 10,000 workers, a plan may use fewer: the largest power of two below, or the best plan of a
    smaller number in `numbers`, if it is faster, with what is `known` of failures counted. With `per_worker`, the
    problem's batch size is that of each worker.
    Raises UsageError for several batch sizes, or numbers below 1.
    """
    if len(problem.batch_sizes) != 1:
        raise UsageError(f"scaling is for one batch size, not {', '.join(map(str, problem.batch_sizes))}: give one")
    if min(numbers) < 1:
        raise UsageError(f"scale lists {min(numbers)}: numbers of workers are 1 or more")
    numbers = sorted(set(numbers))
    wide = problem.but(cluster=grow(problem.cluster, max(numbers)), workers=1)
    prices = Prices(wide)
    best_on = cache(lambda count, batch, way: best(wide.but(workers=count, batch_sizes=(batch,)), way, prices, known))
    rows: list[Scaled] = []
    for workers in numbers:
        batch = problem.batch_sizes[0] * (workers if per_worker else 1)
        for way in WAYS:
            options = [best_on(count, batch, way) for count in sorted({workers, 1 << (workers.bit_length() - 1)})]
            options += [row for row in rows[-len(WAYS) :] if row.way == way]
            fastest = max(options, key=lambda row: row.useful_per_second)
            share = fastest.workers / workers
            used = None if fastest.utilisation is None else fastest.utilisation * share
            rows.append(replace(fastest, workers=workers, utilisation=used))
    first = next((row for row in rows if row.way == "hybrid" and row.plan is not None), None)
    speed = None if first is None else (first.examples_per_second or 0.0) / first.workers
    return [
        row
        if row.plan is None or not speed
        else replace(row, efficiency=(row.examples_per_second or 0.0) / row.workers / speed)
        for row in rows
    ]


def batches(problem: Problem, size: int) -> list[Scaled]:
    """The best plan of each way at batch sizes around `size`, on all workers of the problem."""
    prices = Prices(problem)
    sizes = sorted({max(1, round(size * 2.0**power)) for power in BATCHES})
    return [best(problem.but(batch_sizes=(batch,)), way, prices) for batch in sizes for way in WAYS]


def best(problem: Problem, way: str, prices: Prices, known: Reliability | None = None) -> Scaled:
    """The fastest plan of a way that uses all workers, and its goodput, if failures are `known`."""
    whole = limited_to(way, problem.but(all_workers=True))
    plans = [
        search(
            whole.but(methods=(name,)),
            Objective(),
            prices=prices,
            enough=ENOUGH,
            among=lambda c: way != "pipeline" or c.mesh.data == 1,
        ).best
        for name in whole.names
    ]
    plan = min((plan for plan in plans if plan is not None), key=lambda plan: plan.formula, default=None)
    (batch,) = problem.batch_sizes
    if plan is None:
        return Scaled(way=way, workers=problem.workers, batch=batch, plan=None)
    (plan,) = refined([plan], prices)
    return Scaled(
        way=way,
        workers=problem.workers,
        batch=batch,
        plan=plan,
        utilisation=flops(problem, batch) / (peak(problem, prices.dtype) * plan.seconds),
        goodput=None if known is None else goodput_of(plan, problem, known),
    )


def flops(problem: Problem, batch: int) -> float:
    """FLOPs of the forwards and backwards of a batch; no gradient of the data is computed."""
    first, *others = problem.layers
    first_layer = first.flops("F").at(batch) + first.flops("W").at(batch)
    return first_layer + sum(layer.flops("F").at(batch) + layer.flops("B").at(batch) for layer in others)


def peak(problem: Problem, dtype: str) -> float:
    """FLOP/s of all workers of a problem."""
    used, devices = Counter(problem.cluster.kinds[: problem.workers]), problem.cluster.devices_by_kind
    return sum(count * devices[kind].peak_of(dtype_of_products(dtype)) for kind, count in used.items())
