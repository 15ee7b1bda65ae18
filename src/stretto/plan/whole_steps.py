"""Predictions corrected by whole steps that were measured on this machine, one way to divide the work at a time.

What is measured of layers and collectives one by one misses what happens between them: processes that wait for the
later one, caches that others have filled. So of each way one plan, its probe, is trained for some seconds, and the
predictions of all plans that divide the work in that way are multiplied by the ratio of its seconds.
"""

from collections.abc import Mapping

from stretto.methods import BASELINE
from stretto.plan.branch_and_bound import Plan, plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Objective
from stretto.plan.problem import SHARDS, Problem
from stretto.plan.refine import MOST, actions, simulated
from stretto.plan.search_space import Candidate, candidates
from stretto.plan.ways import LOCAL, ONE_WORKER, PIPELINE, WAYS, WITHOUT_DRAIN, ways_of

PROBED = {
    PIPELINE: "1f1b",
    WITHOUT_DRAIN: "pb",
    LOCAL: "greedy",
}  # the method of a way's probe; of the others plain training
MICROBATCHES = 2  # of a probe, for each of its workers


def probes(problem: Problem, workers: int) -> dict[str, Plan]:
    """The plan to measure for each way on so many workers; without those that the problem cannot have.

    They do not depend on the limits of a problem, nor on earlier ratios: other limits need no other measurements.
    """
    batch = max(problem.batch_sizes)
    tensors = (1,) if problem.whole_layers else (1, *problem.tensor_costs)
    methods = (method for method in PROBED.values() if method != PROBED[LOCAL] or not problem.why_no_local(method))
    every = problem.but(
        workers=workers, batch_sizes=(batch,), methods=(BASELINE, *methods), recompute=("none",), shards=SHARDS,
        pipelines=None, data_parallels=None, tensors=tensors, spaces=((1, 1), (workers, 1)),
        microbatches=None, stages=None, all_workers=False, ratios={}, byte_ratios={},
    )  # fmt: skip
    prices, fitting = Prices(every), list(candidates(every))
    found = {}
    for way in WAYS:
        chosen = nearest(fitting, way, workers)
        plan = None if chosen is None else plan_of(chosen, Objective(), prices)
        if plan is not None:
            found[way] = plan if actions(plan) > MOST else simulated(plan, prices)
    return found


def nearest(fitting: list[Candidate], way: str, workers: int) -> Candidate | None:
    """The candidate that divides the work in this way only, with about MICROBATCHES for each worker."""
    size, method = 1 if way == ONE_WORKER else workers, PROBED.get(way, BASELINE)
    wanted = MICROBATCHES * size if way == PIPELINE else 1
    same = (c for c in fitting if ways_of(c) == (way,) and c.workers == size and c.method == method)
    return min(same, key=lambda c: (abs(c.microbatches - wanted), c.stages), default=None)


def memory_groups(plans: Mapping[str, Plan], memory: float) -> list[dict[str, Plan]]:
    """The plans in groups that fit beside each other into the memory of a worker, in bytes."""
    groups: list[dict[str, Plan]] = [{}]
    free = memory
    for way, plan in plans.items():
        needed = max(plan.bytes)
        if needed > free and groups[-1]:
            groups.append({})
            free = memory
        groups[-1][way] = plan
        free -= needed
    return groups
