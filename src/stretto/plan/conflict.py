"""Why no candidate exists: the fewest limits that rule out every candidate together, and what would be possible."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

from stretto.plan.planned_methods import planned
from stretto.plan.problem import RECOMPUTE, SHARDS, Problem
from stretto.plan.search_space import Candidate, all_alternatives, candidates, divisors, tensors_of

LOOKED_AT = 5000  # candidates of a freed problem that are looked at for the values that would be possible
SHOWN = 6  # of these values
INNER = ("tensors", "spaces")  # what may cut a stage
AXES = ("pipelines", "data_parallels", *INNER)


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
    options = " and ".join(written(field, problem) for field in fields)
    reason = next(laws(fields, freed), "")
    instead = [f"{LIMITS[field].option} {found}" for field in fields if (found := values(field, freed))]
    return (
        f"there is no way to divide {len(problem.layers)} layers and batches of "
        f"{', '.join(map(str, problem.batch_sizes))} examples among {problem.workers} workers under {options}"
        f"{reason and ': '}{reason}. Possible instead: {', or '.join(instead)}"
    )


def written(field: str, problem: Problem) -> str:
    """A limit as its option is written."""
    value = getattr(problem, field)
    if field == "all_workers":
        return LIMITS[field].option
    listed = tensors_of(problem) if field == "tensors" else value
    if field == "sequences":
        listed = ["yes" if each else "no" for each in value] if len(value) == 1 else ["auto"]
    separator = " " if field == "spaces" else ","
    return f"{LIMITS[field].option} {separator.join(map(text, listed))}"


def text(value: object) -> str:
    """A value as an option takes it: (2, 1) is 2,1."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def values(field: str, freed: Problem) -> str:
    """The values of a lifted limit for which there are candidates, as text; empty for none."""
    if field == "batch_sizes":
        return batches(freed)
    some = some_without(freed, field)
    found = {LIMITS[field].value(c) for c in some}
    ordered = sorted(found, key=lambda value: (value if isinstance(value, int) else 0, text(value)))
    more = len(ordered) > SHOWN or len(some) >= LOOKED_AT
    listed = " or ".join(map(text, ordered[:SHOWN])) + (" or others" if more else "")
    return f"left out ({listed} workers)" if field == "all_workers" else listed


def some_without(freed: Problem, field: str) -> list[Candidate]:
    """Some candidates without a limit, LOOKED_AT at most, and their alternatives."""
    some = islice(all_alternatives(without(freed, field)), LOOKED_AT)
    return [c for alternatives in some for c in alternatives.each()]


def batches(freed: Problem) -> str:
    """The batch sizes closest to the one asked for, of those for which a candidate exists."""
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
        yield f"in layer {small[0][1]} images have fewer rows than {text(small[0][0])} has parts"
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
