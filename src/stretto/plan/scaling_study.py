"""Throughput against the number of workers, and utilisation against the batch: the best plan of each way at each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stretto.errors import UsageError
from stretto.plan.branch_and_bound import Plan, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.explain import grown
from stretto.plan.objective import Objective
from stretto.plan.problem import Problem
from stretto.plan.refine import refined

ENOUGH = 12  # candidates of a method that are priced: on thousands of workers hundreds are about as promising
BATCHES = (-4, -2, 0, 2, 4)  # powers of two that the batch is multiplied by


def alone(problem: Problem) -> Problem:
    """The whole model on every worker."""
    return problem.but(stages=(1,), tensors=(1,), spaces=((1, 1),))


def in_a_row(problem: Problem) -> Problem:
    """All workers hold stages of one pipeline: see `best`."""
    return problem.but(tensors=(1,), spaces=((1, 1),))


def any_way(problem: Problem) -> Problem:
    """Whatever is fastest."""
    return problem


WAYS: Mapping[str, Callable[[Problem], Problem]] = {
    "hybrid": any_way, "data parallel": alone, "pipeline": in_a_row,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The best plan of a way for so many workers and a batch; None where nothing fits, or no way divides them.

    `efficiency` is throughput for each worker that there is, over that of the fewest workers on which a hybrid plan
    fits. `utilisation` is FLOPs of forwards and backwards over what all workers could have done.
    """

    way: str
    workers: int
    batch: int
    plan: Plan | None
    efficiency: float | None = None
    utilisation: float | None = None

    @property
    def examples_per_second(self) -> float | None:
        """Throughput."""
        return None if self.plan is None else self.plan.candidate.batch / self.plan.seconds


def scaling(problem: Problem, numbers: Sequence[int], *, per_worker: bool = False) -> list[Scaled]:
    """Each way on each number of workers, on a cluster with as many more nodes as that takes.

    Of plans for all of them, for the largest power of two among them and for the numbers before, the fastest counts:
    few ways divide 10,000 workers. `per_worker`: the problem's batch size is that of every worker. Raises UsageError
    for several batch sizes.
    """
    if len(problem.batch_sizes) != 1:
        raise UsageError(f"scaling is for one batch size, not {', '.join(map(str, problem.batch_sizes))}: give one")
    if min(numbers) < 1:
        raise UsageError(f"scale lists {min(numbers)}: numbers of workers are 1 or more")
    numbers = sorted(set(numbers))
    wide = problem.but(cluster=grown(problem.cluster, max(numbers)), workers=1)
    prices = Prices(wide)
    at = cache(lambda each, batch, way: best(wide.but(workers=each, batch_sizes=(batch,)), way, prices))
    found: list[Scaled] = []
    for workers in numbers:
        batch = problem.batch_sizes[0] * (workers if per_worker else 1)
        for way in WAYS:
            every = [at(each, batch, way) for each in sorted({workers, 1 << (workers.bit_length() - 1)})]
            every += [each for each in found[-len(WAYS) :] if each.way == way]
            fastest = max(every, key=lambda each: each.examples_per_second or 0.0)
            share = fastest.workers / workers
            used = None if fastest.utilisation is None else fastest.utilisation * share
            found.append(replace(fastest, workers=workers, utilisation=used))
    one = next((each for each in found if each.way == "hybrid" and each.plan is not None), None)
    speed = None if one is None else (one.examples_per_second or 0.0) / one.workers
    return [
        each if each.plan is None or not speed
        else replace(each, efficiency=(each.examples_per_second or 0.0) / each.workers / speed)
        for each in found
    ]  # fmt: skip


def batches(problem: Problem, size: int) -> list[Scaled]:
    """Each way at batch sizes around one, on all workers of the problem."""
    prices = Prices(problem)
    sizes = sorted({max(1, round(size * 2.0**power)) for power in BATCHES})
    return [best(problem.but(batch_sizes=(each,)), way, prices) for each in sizes for way in WAYS]


def best(problem: Problem, way: str, prices: Prices) -> Scaled:
    """The fastest plan of a way that uses all workers."""
    whole = WAYS[way](problem.but(all_workers=True))
    found = [
        search(
            whole.but(methods=(name,)), Objective(), prices=prices, enough=ENOUGH,
            among=lambda c: way != "pipeline" or c.mesh.data == 1,
        ).best
        for name in whole.names
    ]  # fmt: skip
    plan = min((each for each in found if each is not None), key=lambda each: each.formula, default=None)
    (batch,) = problem.batch_sizes
    if plan is None:
        return Scaled(way=way, workers=problem.workers, batch=batch, plan=None)
    (plan,) = refined([plan], prices)
    return Scaled(
        way=way, workers=problem.workers, batch=batch, plan=plan,
        utilisation=flops(problem, batch) / (peak(problem, prices.dtype) * plan.seconds),
    )  # fmt: skip


def flops(problem: Problem, batch: int) -> float:
    """Of the forwards and backwards of a batch; nobody computes the gradient of the data."""
    first, *others = problem.layers
    once = first.flops("F").at(batch) + first.flops("W").at(batch)
    return once + sum(layer.flops("F").at(batch) + layer.flops("B").at(batch) for layer in others)


def peak(problem: Problem, dtype: str) -> float:
    """FLOP/s of all workers of a problem."""
    left, total = problem.workers, 0.0
    for group in problem.cluster.groups:
        taken = min(left, group.nodes * group.workers)
        total += taken * problem.cluster.devices[group.device].peak_of(dtype)
        left -= taken
    return total
