"""Explain a plan: the best plans with one other choice, the frontier, and why no plan fits, or no candidate exists."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise, product
from math import inf, prod
from typing import Any, NamedTuple

from stretto.cost.cluster import Cluster
from stretto.plan.branch_and_bound import Found, Plan, plan_of, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Goal, Objective
from stretto.plan.planned_methods import planned
from stretto.plan.problem import RECOMPUTE, SHARDS, Problem
from stretto.plan.search_space import Candidate, all_alternatives, candidates, divisors, tensors_of

LOOKED_AT = 5000  # candidates of a freed problem that are looked at for the values that would be possible
SHOWN = 6  # of these values
INNER = ("tensors", "spaces")  # what may cut a stage
AXES = ("pipelines", "data_parallels", *INNER)
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
    unbeaten = [
        (plan.candidate.workers, costs, plan)
        for (costs, _), plan in found.items()
        if not any(beats(other, costs) for other in every)
    ]
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


# -- why no candidate exists: the fewest limits that rule out every candidate together ---------------------------------


class Limit(NamedTuple):
    """A choice that a problem limits.

    `option` is what the command line calls it, `free` are all its values, `value` is a candidate's.
    """

    option: str
    free: Callable[[Problem], object]
    value: Callable[[Candidate], object]


def divisible_batch(problem: Problem) -> int:
    """A batch size that every number of replicas and of micro-batches divides."""
    return problem.batch_sizes[0] * 2 * problem.workers * prod({*(problem.microbatches or ())})


def all_spaces(problem: Problem) -> list[tuple[int, int]]:
    """All ways to cut images among some of the workers."""
    return [(h, parts // h) for parts in divisors(problem.workers) for h in divisors(parts)]


LIMITS: Mapping[
    str, Limit
] = {  # by field of Problem; the conflict that is told has the last ones rather than the first
    "batch_sizes": Limit("--batch-size", lambda p: (divisible_batch(p),), lambda c: c.batch),
    "all_workers": Limit("--all-workers", lambda p: False, lambda c: c.workers),
    "microbatches": Limit("--microbatches", lambda p: None, lambda c: c.microbatches),
    "stages": Limit("--stages", lambda p: None, lambda c: c.stages),
    "methods": Limit("--methods", lambda p: ("all",), lambda c: c.method),
    "recompute": Limit("--recompute", lambda p: RECOMPUTE, lambda c: c.recompute),
    "sequences": Limit("--sequence-parallel", lambda p: (False, True), lambda c: "yes" if c.sequence else "no"),
    "shards": Limit("--sharding", lambda p: SHARDS, lambda c: c.shard),
    "spaces": Limit("--space", lambda p: all_spaces(p), lambda c: c.mesh.space),
    "tensors": Limit("--tensor", lambda p: tuple(divisors(p.workers)), lambda c: c.mesh.tensor),
    "data_parallels": Limit("--data-parallel", lambda p: None, lambda c: c.mesh.data),
    "pipelines": Limit("--pipeline", lambda p: None, lambda c: c.pipeline),
}


def possible(problem: Problem) -> bool:
    """Whether a problem has any candidate."""
    return next(candidates(problem), None) is not None


def without(problem: Problem, field: str) -> Problem:
    """The problem with one of its limits lifted."""
    return problem.but(**{field: LIMITS[field].free(problem)})


def conflict(problem: Problem) -> tuple[list[str], Problem]:
    """The fewest limits, as fields, that leave no candidate together, and the problem with all others lifted.

    Each is needed: without it there would be candidates.
    """
    needed = []
    for field in LIMITS:
        lifted = without(problem, field)
        if possible(lifted):
            needed.append(field)
        else:
            problem = lifted
    return needed, problem


def refusal(problem: Problem) -> str:
    """The message that no candidate exists, with the reason and what would be possible."""
    if not problem.names:
        return f"none of the methods {', '.join(problem.methods)} works with optimizer {problem.optimizer!r}"
    fields, freed = conflict(problem)
    options = " and ".join(write_option(field, problem) for field in fields)
    reason = next(laws(fields, freed), "")
    instead = [f"{LIMITS[field].option} {found}" for field in fields if (found := possible_values(field, freed))]
    return (
        f"there is no way to divide {len(problem.layers)} layers and batches of "
        f"{', '.join(map(str, problem.batch_sizes))} examples among {problem.workers} workers under {options}"
        f"{reason and ': '}{reason}. Possible instead: {', or '.join(instead)}"
    )


def write_option(field: str, problem: Problem) -> str:
    """A limit as its option is written."""
    value = getattr(problem, field)
    if field == "all_workers":
        return LIMITS[field].option
    listed = tensors_of(problem) if field == "tensors" else value
    if field == "sequences":
        listed = ["yes" if each else "no" for each in value] if len(value) == 1 else ["auto"]
    separator = " " if field == "spaces" else ","
    return f"{LIMITS[field].option} {separator.join(map(as_text, listed))}"


def as_text(value: object) -> str:
    """A value as an option takes it: (2, 1) is 2,1."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def possible_values(field: str, freed: Problem) -> str:
    """The values of a lifted limit for which there are candidates, as text; empty for none."""
    if field == "batch_sizes":
        return nearest_batch(freed)
    some = some_without(freed, field)
    found = {LIMITS[field].value(c) for c in some}
    ordered = sorted(found, key=lambda value: (value if isinstance(value, int) else 0, as_text(value)))
    more = len(ordered) > SHOWN or len(some) >= LOOKED_AT
    listed = " or ".join(map(as_text, ordered[:SHOWN])) + (" or others" if more else "")
    return f"left out ({listed} workers)" if field == "all_workers" else listed


def some_without(freed: Problem, field: str) -> list[Candidate]:
    """Some candidates without a limit, LOOKED_AT at most, and their alternatives."""
    some = islice(all_alternatives(without(freed, field)), LOOKED_AT)
    return [c for alternatives in some for c in alternatives.each()]


def nearest_batch(freed: Problem) -> str:
    """The batch size closest to the one asked for, of those for which a candidate exists; empty for none."""
    size = freed.batch_sizes[0]
    steps = {c.mesh.data * c.microbatches for c in some_without(freed, "batch_sizes")}
    near = {max(1, size // step + more) * step for step in steps for more in (0, 1)}
    ordered = sorted(near, key=lambda batch: abs(batch - size))
    return next((str(batch) for batch in ordered if possible(freed.but(batch_sizes=(batch,)))), "")


def laws(fields: Sequence[str], problem: Problem) -> Iterator[str]:
    """The rules that limits break together, the most particular first."""
    if "spaces" in fields and not problem.sides:
        yield "no layer of this model convolves or pools images [N, C, H, W], which space cuts"
    small = [(space, name) for space in problem.spaces if (name := problem.too_small(space))]
    if "spaces" in fields and small:
        yield f"in layer {small[0][1]} images have fewer rows than {as_text(small[0][0])} has parts"
    if "spaces" in fields and "shards" in fields:
        yield "space is not combined with sharding"
    if "tensors" in fields and "shards" in fields and problem.trained:
        yield "weights are cut (tensor) or sharded among replicas, not both"
    if "shards" in fields and "methods" in fields:
        yield "weights are sharded only under methods that finish every minibatch before the next one (synchronous)"
    if "shards" in fields and problem.costs.ties and {"stages", "pipelines"} & {*fields}:
        yield "layers of this model share weights, which are sharded only where one stage has all of them"
    if "shards" in fields:
        yield "weights are sharded among replicas, of which there must be at least 2"
    all_predict = all(planned(name).predicts_gradients for name in problem.names)
    if "methods" in fields and {"data_parallels", *INNER} & {*fields} and all_predict:
        yield "what predicts a stage's gradient learns in one process, without replicas, and no stage is shared"
    if "methods" in fields and not {"batch_sizes", "microbatches"} & {*fields} and len(problem.names) <= SHOWN:
        yield ", ".join(f"{name} has a pipeline of {pipelines_of(name)}" for name in problem.names)
    if "methods" in fields:
        yield "not every method can divide these examples into micro-batches that fill its pipeline"
    if "stages" in fields or ("pipelines" in fields and min(problem.pipelines or (1,)) > len(problem.layers)):
        yield f"a stage holds at least one of the {len(problem.layers)} layers, and a worker at least one stage"
    if "batch_sizes" in fields:
        yield "replicas take as many examples each, and so do micro-batches"
    if {*AXES} & {*fields}:
        share = "" if problem.all_workers else " or a divisor of it"
        yield f"pipeline x data-parallel x tensor x space is the number of workers, {problem.workers}{share}"


def pipelines_of(method: str) -> str:
    """The numbers of workers in a pipeline for which plans try a method, as text."""
    planning = planned(method).planning
    fewest, most = planning.workers
    if planning.losses:  # at least 2 chunks, and fewer than stages
        fewest = max(fewest, -(-3 // planning.stages_per_worker))
    if most == fewest:
        return f"{fewest} worker" + ("s" if fewest > 1 else "")
    return f"{fewest} or more workers" if most is None else f"{fewest} to {most} workers"
