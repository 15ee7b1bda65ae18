"""What `stretto plan --try` has measured, beside the cluster's file: a later plan of the same problem goes by it.

cluster.toml has cluster.tried.json: the last trials of each problem, which is a model with its data, loss and
optimizer and the choices that a plan has, on one machine. Only what was measured together is compared, so that new
trials replace the former ones.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.mesh import Mesh
from stretto.options.kinds import check_values
from stretto.plan import beside_cluster
from stretto.plan.branch_and_bound import Plan, plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Objective
from stretto.plan.problem import Problem
from stretto.plan.search_space import Candidate, candidates
from stretto.plan.trials import predicted

Tried = Mapping[str, Any]  # one plan that was tried, as `row` writes it
# Fields of a problem that are no choices.
PRICED = (
    "costs", "tensor_costs", "form_costs", "cluster", "heads", "named_heads", "no_heads", "sides", "ratios",
    "byte_ratios",
)  # fmt: skip
KINDS: Mapping[str, Any] = {
    "tried": list[dict[str, Any]], "tried_on": str, "try_noise": float, "remarks": list[str],
}  # fmt: skip
TRIED: Mapping[str, Any] = {
    **dict.fromkeys(("method", "sharding", "planned_method"), str),
    **dict.fromkeys(("workers", "pipeline", "data_parallel", "tensor", "stages", "microbatches", "batch_size"), int),
    **dict.fromkeys(("losses", "ahead", "per_worker"), int), "space": tuple[int, int], "bounds": list[int],
    "placement": list[int], "recompute": bool | str, "sequence_parallel": bool, "allowed": bool,
    **dict.fromkeys(("predicted_seconds", "measured_seconds", "reported_seconds"), float),
}  # fmt: skip
WORD = "problems"  # of the file, above its records
NEEDED = ("method", "workers", "bounds", "predicted_seconds", "measured_seconds", "reported_seconds", "allowed")


def problem_key(problem: Problem, goal: str, trained: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Sixteen characters that differ if the problem does: its choices, the model's settings, functions, or the machine.

    `sources` are digests of the user's functions and data. What is priced may change: another calibration is no other
    problem.
    """
    choices = {each.name: getattr(problem, each.name) for each in fields(problem) if each.name not in PRICED}
    return beside_cluster.key_of({
        "choices": choices, "goal": goal, "trained": dict(trained), "sources": dict(sources), "host": platform.node(),
    })  # fmt: skip


def row(plan: Plan) -> dict[str, Any]:
    """A plan's method and axes, and its predicted seconds of a step, as plain data."""
    c = plan.candidate
    return {
        "method": str(c),
        "workers": c.workers,
        "pipeline": c.pipeline,
        "data_parallel": c.mesh.data,
        "tensor": c.mesh.tensor,
        "space": list(c.mesh.space),
        "sharding": c.shard,
        "stages": c.stages,
        "bounds": list(plan.bounds),
        "microbatches": c.microbatches,
        "recompute": c.recompute,
        "sequence_parallel": c.sequence,
        "batch_size": c.batch,
        "losses": c.losses,
        "placement": list(c.placement),
        "ahead": c.ahead,
        "per_worker": c.per_worker,
        "planned_method": c.method,
        "predicted_seconds": plan.seconds,
    }


def candidate_of(tried: Tried) -> Candidate:
    """The candidate of a plan that was tried."""
    height, width = tried["space"]
    former = {False: "none", True: "stage"}  # as versions before 0.3 wrote it
    recompute = str(former.get(tried["recompute"], tried["recompute"]))
    mesh = Mesh(data=tried["data_parallel"], tensor=tried["tensor"], space=(height, width))
    return Candidate(
        tried["pipeline"], mesh, tried["batch_size"], tried["planned_method"], tried["microbatches"],
        recompute, tried["sharding"], tried["losses"], tuple(tried.get("placement", ())),
        tried.get("ahead", 0), tried.get("sequence_parallel", False), tried.get("per_worker", 0),
    )  # fmt: skip


def keep(file: Path, key: str, record: Mapping[str, Any]) -> None:
    """Write the trials of a problem into the file, in place of its former ones. Raises OSError, UsageError."""
    beside_cluster.write(file, WORD, read(file) | {key: dict(record)})


def read(file: Path) -> dict[str, Any]:
    """The trials in a file by `problem_key`; none if there is no file. Raises UsageError if it is damaged."""
    what, effect = "trials that stretto plan --try wrote", "plans go by predictions"
    return beside_cluster.read(file, WORD, check, what=what, effect=effect)


def check(record: Mapping[str, Any]) -> None:
    """Raise ValueError, KeyError or UsageError for trials that are not as `row` and the command write them."""
    check_values("trials", record, KINDS)
    for tried in record["tried"]:
        check_values("tried", tried, TRIED)
        candidate_of(tried)
        _ = [tried[name] for name in NEEDED]


def best_tried(
    tried: Sequence[Tried], problem: Problem, objective: Objective, prices: Prices
) -> tuple[Plan, Tried] | None:
    """The fastest of the plans that were tried and that the problem allows, with its trial; None if there is none.

    A plan whose stages would be cut elsewhere today, after another calibration, is not the one that was tried.
    """
    allowed = set(candidates(problem))
    found = [(candidate_of(each), each) for each in tried]
    plans = [(plan_of(candidate, objective, prices), each) for candidate, each in found if candidate in allowed]
    same = [(plan, each) for plan, each in plans if plan is not None and list(plan.bounds) == list(each["bounds"])]
    if not same:
        return None
    best, trial = min(same, key=lambda pair: pair[0].value / pair[0].seconds * pair[1]["measured_seconds"])
    return predicted(best, prices), trial
