"""Explain a plan: the best plans with one other choice, the frontier, and why no plan fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from typing import Any

from stretto.cost.cluster import Cluster
from stretto.plan.branch_and_bound import Found, Plan, plan_of, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.conflict import possible, refusal
from stretto.plan.objective import Goal, Objective
from stretto.plan.problem import RECOMPUTE, SHARDS, Problem
from stretto.plan.search_space import Candidate, candidates

Costs = tuple[float, float, float, float]  # time, memory, money and energy; less is better


def choices(c: Candidate) -> Mapping[str, object]:
    """A candidate's choices by name, without replicas, which follow, and micro-batches, which may differ too."""
    return {
        "method": c.method, "chunks": c.losses, "workers": c.workers, "pipeline": c.pipeline, "tensor": c.mesh.tensor,
        "space": c.mesh.space, "batch size": c.batch, "recompute": c.recompute, "sharding": c.shard,
        "sequence parallel": c.sequence,
    }  # fmt: skip


def explain(problem: Problem, aim: Objective, best: Plan, prices: Prices) -> list[dict[str, Any]]:
    """For every choice, the best plans that differ in it alone, as plain data; micro-batches may differ too.

    By closed forms, closest value first, those that do not fit last. `more_seconds` are of the term that differs most.
    """
    chosen, all_candidates = choices(best.candidate), list(candidates(problem))
    groups: dict[str, list[Candidate]] = {}
    for c in all_candidates:
        changed = [key for key, value in choices(c).items() if chosen[key] != value]
        if len(changed) == 1:
            groups.setdefault(f"{changed[0]} {choices(c)[changed[0]]}", []).append(c)
        elif not changed and c.microbatches != best.candidate.microbatches:
            groups.setdefault(f"micro-batches {c.microbatches}", []).append(c)
    compared = [(choice, best_of(group, aim, prices)) for choice, group in groups.items()]
    compared.sort(key=lambda pair: (pair[1] is None, pair[1].value if pair[1] else 0.0, pair[0]))
    terms, rows = prices.terms(best.candidate, best.bounds), list[dict[str, Any]]()
    for choice, plan in compared:
        if plan is None:
            rows.append({"choice": choice, "fits": False})
            continue
        other = prices.terms(plan.candidate, plan.bounds)
        term = max(terms, key=lambda name: abs(other[name] - terms[name]))
        rows.append({
            "choice": choice, "fits": True, "method": str(plan.candidate), "seconds": plan.formula,
            "times": plan.formula / best.formula, "term": term, "more_seconds": other[term] - terms[term],
        })  # fmt: skip
    return rows


def best_of(group: Sequence[Candidate], aim: Objective, prices: Prices) -> Plan | None:
    """The best plan of some candidates, by closed forms; None if none fits."""
    plans = [plan for c in group if (plan := plan_of(c, aim, prices)) is not None]
    return min(plans, key=lambda plan: plan.value, default=None)


def frontier(problem: Problem, aim: Objective) -> list[dict[str, Any]]:
    """The plans that no other beats in time, memory, money and energy, as plain data.

    They are searched for each number of workers: the fastest plan, the fastest in half of its memory, and so on; the
    same for the cheapest, where workers differ in price, and for the one of least energy, where it may be another one.
    """
    goals: list[Goal] = ["loss" if aim.goal == "loss" else "step", *other_goals(problem)]
    found: dict[tuple[Costs, str], Plan] = {}
    for workers, goal in product(sorted({c.workers for c in candidates(problem)}), goals):
        memory = inf
        while True:
            limited = with_memory(problem, memory).but(workers=workers, all_workers=True)
            best = search(limited, replace(aim, goal=goal)).best
            if best is None:
                break
            found[costs_of(best, aim), str(best.candidate)] = best
            memory = max(best.bytes) / 2
    every = {costs for costs, _ in found}
    unbeaten = [(plan.candidate.workers, costs, plan) for (costs, _), plan in found.items()
                if not any(beats(other, costs) for other in every)]  # fmt: skip
    return [
        {"method": str(c), "workers": c.workers, "seconds": plan.seconds, "bytes": round(max(plan.bytes)),
         "money": plan.money, "joules": plan.joules, "batch_size": c.batch, "microbatches": c.microbatches,
         "recompute": c.recompute, "pipeline": c.pipeline, "tensor": c.mesh.tensor, "data": c.mesh.data,
         "sharding": c.shard}
        for *_, plan in sorted(unbeaten, key=lambda each: each[:2]) for c in (plan.candidate,)
    ]  # fmt: skip


def costs_of(plan: Plan, aim: Objective) -> Costs:
    """Time, money and energy of an example, or up to the loss where that is the objective; bytes of the fullest worker.

    Without prices, money is the number of workers; without powers, energy is 0.
    """
    c = plan.candidate
    steps = aim.steps(c) if aim.goal == "loss" else 1 / c.batch
    money = float(c.workers) if plan.money is None else plan.money * steps
    return plan.seconds * steps, max(plan.bytes), money, (plan.joules or 0.0) * steps


def other_goals(problem: Problem) -> Iterator[Goal]:
    """The goals that another plan than the fastest one may be best in, on a given number of workers."""
    devices = [problem.cluster.devices[kind.device] for kind in dict.fromkeys(problem.cluster.kinds)]
    prices, powers = {device.price_per_hour for device in devices}, {device.watts for device in devices}
    if None not in prices and len(prices) > 1:
        yield "money"
    if None not in powers and (len(powers) > 1 or any(device.idle_watts is not None for device in devices)):
        yield "energy"


def with_memory(problem: Problem, most: float) -> Problem:
    """The problem on devices of at most so many bytes of memory."""
    cluster = problem.cluster
    devices = {name: replace(device, memory=min(device.memory, most)) for name, device in cluster.devices.items()}
    return problem.but(cluster=replace(cluster, devices=devices))


def beats(one: Costs, other: Costs) -> bool:
    """Whether `one` is no worse in time, memory, money and energy, and better in one of them."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def misfit(problem: Problem) -> str:
    """The message that no plan fits: the worker whose memory is too small, the bytes missing, and a remedy."""
    cluster = problem.cluster
    boundless = {name: replace(device, memory=inf) for name, device in cluster.devices.items()}
    least = search(problem.but(cluster=replace(cluster, devices=boundless)), Objective(goal="memory")).best
    if least is None:
        return headless(problem) if possible(problem) else refusal(problem)
    prices = Prices(problem)
    c = least.candidate
    memory = prices.places_of(c).memory
    worker = max(range(c.pipeline), key=lambda w: least.bytes[w] / memory[w])
    stages = [s for s in range(c.stages) if c.worker_of(s) == worker]
    parts = {"weights, gradients and optimizer state": 0.0, "activations": 0.0}
    costs = prices.stages_at(c, least.bounds)
    for s in stages:
        parts["weights, gradients and optimizer state"] += float(costs[s].static_bytes)
        parts["activations"] += float(c.planning.held(c.stage_at(s)) * costs[s].microbatch_bytes)
    parts["activations"] += max(float(costs[s].recompute_bytes) for s in stages)
    stage_layers = list(pairwise(least.bounds))
    layers = ", ".join(f"{stage_layers[s][0]} to {stage_layers[s][1] - 1}" for s in stages)
    breakdown = " and ".join(f"{size(value)} of {name}" for name, value in parts.items())
    return (
        f"no plan fits the memory of {problem.workers} workers of {cluster.name!r}. The one that needs least, {c} in "
        f"{c.stages} stages, {c.mesh.data} replicas, tensor {c.mesh.tensor}, sharding {c.shard}, fails on worker "
        f"{worker} (layers {layers}): {breakdown}, "
        f"{size(least.bytes[worker])} in all, are "
        f"{size(least.bytes[worker] - memory[worker])} more than its memory of {size(memory[worker])}. "
        f"{remedy(problem)}"
    )


def headless(problem: Problem) -> str:
    """The message that no stage of any candidate can end where it would have to: a head is missing there."""
    known = [heads for name in problem.names if (heads := problem.heads_of(name)) is not None]
    assert known, "candidates without memory limits are only missing where heads are"
    rows = known[0].rows
    places = [str(layer) for layer, head in enumerate(rows[:-1]) if head is not None]
    return (
        f"no plan has the methods {', '.join(problem.names)}: stages with a loss of their own need a head, and of "
        f"{len(rows)} layers only {', '.join(places)} can have one behind them. Choose fewer stages (--stages), or "
        "other methods"
    )


def remedy(problem: Problem) -> str:
    """The nearest problem with a plan that fits, for a message: first more choices, then more workers."""
    for what, changed in relaxations(problem):
        found: Found = search(changed, Objective())
        if found.best is not None:
            c = found.best.candidate
            return (
                f"It would fit with {what}: {c} on {c.workers} workers (pipeline {c.pipeline}, replicas {c.mesh.data}, "
                f"tensor {c.mesh.tensor}, sharding {c.shard}), {size(max(found.best.bytes))} on the fullest worker"
            )
    layer_bytes = [layer.parameter_bytes + layer.gradient_bytes + problem.state(layer) for layer in problem.layers]
    largest, memory = max(layer_bytes), max(device.memory for device in problem.cluster.devices.values())
    return (
        f"Nor would it fit on 64 times as many workers: layer {layer_bytes.index(largest)} alone has {size(largest)} "
        f"of weights, gradients and optimizer state, and no device has more memory than {size(memory)}; cut it into "
        "several, or take devices with more memory"
    )


def relaxations(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems with more choices or more workers, nearest first, and how to describe each."""
    relaxed = problem.but(
        recompute=RECOMPUTE,
        shards=SHARDS,
        microbatches=None,
        stages=None,
        begins=None,
        pipelines=None,
        data_parallels=None,
    )
    yield "recomputation", problem.but(recompute=RECOMPUTE)
    yield "sharding", problem.but(shards=SHARDS)
    yield "smaller micro-batches", problem.but(microbatches=None)
    yield (
        "other numbers of stages, workers of a pipeline and replicas",
        problem.but(stages=None, begins=None, pipelines=None, data_parallels=None),
    )
    yield "recomputation, sharding and any cut in micro-batches, stages and replicas", relaxed
    yield "all synchronous methods, recomputation and sharding", relaxed.but(methods=("synchronous",))
    for factor in (2, 4, 8, 16, 32, 64):
        cluster = grow(problem.cluster, problem.workers * factor)
        batches = tuple(dict.fromkeys((*problem.batch_sizes,)))
        changed = relaxed.but(cluster=cluster, workers=problem.workers * factor, batch_sizes=batches)
        yield f"{factor} times as many workers", changed


def grow(cluster: Cluster, workers: int) -> Cluster:
    """The cluster with enough nodes for `workers`; a group without a link between nodes gets more devices a node."""
    if cluster.num_workers >= workers:
        return cluster
    *others, last = cluster.groups
    missing = workers - cluster.num_workers
    if last.between is not None:
        grown_last = replace(last, nodes=last.nodes + -(-missing // last.workers))
    else:
        within = last.within or next(iter(cluster.links), None)
        more = -(-missing // last.nodes)
        speeds = None if last.speeds is None else (*last.speeds, *last.speeds[-1:] * more)
        grown_last = replace(last, workers=last.workers + more, speeds=speeds, within=within)
    return replace(cluster, groups=(*others, grown_last))


def size(num_bytes: float) -> str:
    """Bytes as text with three digits: "1.5 GB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def describe_axes(data: int, pipeline: int, tensor: int, space: Sequence[int] = (1, 1)) -> list[str]:
    """The axes that are longer than one, as text: "data 2"."""
    lengths = {"data": data, "pipeline": pipeline, "tensor": tensor}
    words = [f"{axis} {length}" for axis, length in lengths.items() if length > 1]
    return [*words, f"space {space[0]}x{space[1]}"] if max(space) > 1 else words
