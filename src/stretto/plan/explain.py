"""Why this plan and not another: what changes where one choice is another one; and what is missing where none fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from stretto.cost.cluster import Cluster
from stretto.plan.branch_and_bound import Found, Plan, plan_of, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Objective
from stretto.plan.problem import SHARDS, Problem
from stretto.plan.search_space import Candidate, candidates


@dataclass(frozen=True)
class Alternative:
    """The best plan with one other choice; `plan` is None where none fits. `term` changes most, by `more` seconds."""

    choice: str
    plan: Plan | None
    term: str = ""
    more: float = 0.0


def choices(c: Candidate) -> Mapping[str, object]:
    """What is chosen in a candidate; replicas follow from it, and micro-batches go with every other choice."""
    return {
        "method": c.method, "chunks": c.losses, "workers": c.workers, "pipeline": c.pipeline, "tensor": c.mesh.tensor,
        "space": c.mesh.space, "batch size": c.batch, "recompute": c.recompute, "sharding": c.shard,
    }  # fmt: skip


def alternatives(problem: Problem, aim: Objective, best: Plan, prices: Prices) -> list[Alternative]:
    """For every choice the best plans that differ in it alone, micro-batches being free; the closest first."""
    own, every = choices(best.candidate), list(candidates(problem))
    found = []
    for key in own:
        near = [c for c in every if differs_in(choices(c), own) == [key]]
        near.sort(key=lambda c: str(choices(c)[key]))
        for value, group in groupby(near, key=lambda c: choices(c)[key]):
            found.append(alternative(f"{key} {value}", list(group), aim, best, prices))
    same = [c for c in every if choices(c) == own and c.microbatches != best.candidate.microbatches]
    found += [alternative(f"micro-batches {c.microbatches}", [c], aim, best, prices) for c in same]
    return sorted(found, key=lambda each: (each.plan is None, each.plan.value if each.plan else 0.0, each.choice))


def differs_in(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """The choices that are not the same."""
    return [key for key, value in one.items() if other[key] != value]


def alternative(choice: str, group: Sequence[Candidate], aim: Objective, best: Plan, prices: Prices) -> Alternative:
    """The best plan of some candidates beside the best of all, by closed forms."""
    plans = [plan for c in group if (plan := plan_of(c, aim, prices)) is not None]
    if not plans:
        return Alternative(choice, None)
    plan = min(plans, key=lambda each: each.value)
    terms, others = prices.terms(best.candidate, best.bounds), prices.terms(plan.candidate, plan.bounds)
    term = max(terms, key=lambda name: abs(others[name] - terms[name]))
    return Alternative(choice, plan, term, others[term] - terms[term])


@dataclass(frozen=True)
class FrontierPoint:
    """A plan of the frontier."""

    plan: Plan
    memory: float  # the most that one worker takes


def frontier(problem: Problem, aim: Objective) -> list[FrontierPoint]:
    """Plans that no other beats in time, memory and money: for each number of workers the fastest, then the fastest

    in half of its memory, and so on.
    """
    numbers = sorted({c.workers for c in candidates(problem)})
    points: list[FrontierPoint] = []
    for workers in numbers:
        room = float("inf")
        while True:
            some = limited(problem, workers, room)
            best = search(some, replace(aim, goal="step" if aim.goal == "memory" else aim.goal)).best
            if best is None:
                break
            points.append(FrontierPoint(best, max(best.bytes)))
            room = max(best.bytes) / 2
    return [point for point in points if not any(beats(other, point) for other in points)]


def limited(problem: Problem, workers: int, room: float) -> Problem:
    """All of so many workers, each with so much memory at most."""
    cluster = problem.cluster
    devices = {name: replace(each, memory=min(each.memory, room)) for name, each in cluster.devices.items()}
    return problem.but(cluster=replace(cluster, devices=devices), workers=workers, all_workers=True)


def beats(one: FrontierPoint, other: FrontierPoint) -> bool:
    """Whether a point is no worse in anything and better in something."""
    mine, its = ((p.plan.value, p.memory, p.plan.money or p.plan.candidate.workers) for p in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def misfit(problem: Problem) -> str:
    """Which bound fails, on which worker, by how much, and the nearest plan that would fit."""
    found = search(boundless(problem), Objective(goal="memory"))
    if found.best is None:
        return nothing_to_try(problem)
    best, prices = found.best, Prices(problem)
    c = best.candidate
    room = prices.where(c).memory
    worker = max(range(c.pipeline), key=lambda w: best.bytes[w] / room[w])
    stages = [s for s in range(c.stages) if c.home(s) == worker]
    parts = {"weights, gradients and optimizer state": 0.0, "activations": 0.0}
    own = prices.at(c, best.bounds)
    for s in stages:
        parts["weights, gradients and optimizer state"] += float(own[s].static)
        parts["activations"] += float(c.planning.held(c.at(s)) * own[s].each + own[s].once)
    spans = list(pairwise(best.bounds))
    layers = ", ".join(f"{spans[s][0]} to {spans[s][1] - 1}" for s in stages)
    made = " and ".join(f"{size(value)} of {name}" for name, value in parts.items())
    return (
        f"no plan fits the memory of {problem.workers} workers of {problem.cluster.name!r}. The one that needs least, "
        f"{c} in {c.stages} stages, {c.mesh.data} replicas, tensor {c.mesh.tensor}, sharding {c.shard}, fails on "
        f"worker {worker} (layers {layers}): {made}, {size(best.bytes[worker])} in all, are "
        f"{size(best.bytes[worker] - room[worker])} more than its memory of {size(room[worker])}. {remedy(problem)}"
    )


def boundless(problem: Problem) -> Problem:
    """The problem on devices that hold anything."""
    cluster = problem.cluster
    devices = {name: replace(each, memory=float("inf")) for name, each in cluster.devices.items()}
    return problem.but(cluster=replace(cluster, devices=devices))


def nothing_to_try(problem: Problem) -> str:
    """Where not memory is what fails."""
    return (
        f"there is no way to divide {len(problem.layers)} layers and batches of "
        f"{', '.join(map(str, problem.batch_sizes))} examples among {problem.workers} workers under "
        f"{', '.join(problem.names) or 'no method'}: allow more methods, or choose a batch size with more divisors"
    )


def remedy(problem: Problem) -> str:
    """The nearest problem that has a plan: first what is not allowed yet, then more workers."""
    for what, changed in relaxations(problem):
        found: Found = search(changed, Objective())
        if found.best is not None:
            c = found.best.candidate
            return (
                f"It would fit with {what}: {c} on {c.workers} workers (pipeline {c.pipeline}, replicas {c.mesh.data}, "
                f"tensor {c.mesh.tensor}, sharding {c.shard}), {size(max(found.best.bytes))} on the fullest worker"
            )
    taken = [layer.parameter_bytes + layer.gradient_bytes + problem.state(layer) for layer in problem.layers]
    room = max(device.memory for device in problem.cluster.devices.values())
    return (
        f"Nor would it fit on 64 times as many workers: layer {taken.index(max(taken))} alone has {size(max(taken))} "
        f"of weights, gradients and optimizer state, and no device has more memory than {size(room)}; cut it into "
        "several, or take devices with more memory"
    )


def relaxations(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems nearby, the nearest first."""
    free = problem.but(recompute=(False, True), shards=SHARDS, microbatches=None, stages=None)
    yield "recomputation", problem.but(recompute=(False, True))
    yield "sharding", problem.but(shards=SHARDS)
    yield "smaller micro-batches", problem.but(microbatches=None)
    yield "recomputation, sharding and any cut in micro-batches and stages", free
    yield "all synchronous methods, recomputation and sharding", free.but(methods=("synchronous",))
    for times in (2, 4, 8, 16, 32, 64):
        more = grown(problem.cluster, problem.workers * times)
        batches = tuple(dict.fromkeys((*problem.batch_sizes,)))
        changed = free.but(cluster=more, workers=problem.workers * times, batch_sizes=batches)
        yield f"{times} times as many workers", changed


def grown(cluster: Cluster, workers: int) -> Cluster:
    """The cluster with as many more nodes as it takes; a single node gets more devices if nothing joins nodes."""
    if cluster.num_workers >= workers:
        return cluster
    *others, last = cluster.groups
    missing = workers - cluster.num_workers
    if last.between is not None:
        grown_last = replace(last, nodes=last.nodes + -(-missing // last.workers))
    else:
        within = last.within or next(iter(cluster.links), None)
        grown_last = replace(last, workers=last.workers + -(-missing // last.nodes), within=within)
    return replace(cluster, groups=(*others, grown_last))


def size(num_bytes: float) -> str:
    """Bytes as people say them."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.3g} B"
