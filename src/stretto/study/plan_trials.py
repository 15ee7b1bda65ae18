"""stretto plan --try: plans that are trained by turns on this machine before one is chosen, and what is kept of it."""

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stretto.cost import Cluster
from stretto.cost.cluster_file import names
from stretto.errors import UsageError
from stretto.measure.busy_cores import busy_cores
from stretto.plan import Objective, Plan
from stretto.plan.candidate_costs import Prices
from stretto.plan.explain import describe_axes
from stretto.plan.trials import (
    TRIALS,
    Trial,
    TrialsOutcome,
    best_tried,
    contest,
    problem_key,
    row,
    side_by_side,
    trials_of,
)
from stretto.report.units import duration, percent
from stretto.settings.planning import PlanSettings
from stretto.study.model_costs import Costed
from stretto.system import fork_server
from stretto.system.destinations import check_file

BUSY = 0.5  # cores that other programs keep busy: from here on times are said to be too long


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was chosen by measured times, its `measured` times, and the command's words about the trials."""

    plan: Plan
    measured: dict[str, Any]
    facts: dict[str, Any]


def check_trials(settings: PlanSettings, cluster: Cluster) -> None:
    """Raise UsageError for trials that cannot be made or kept; begin what they need."""
    tries = settings.tries
    if tries is None:
        return
    if tries < 1:
        raise UsageError(f"try={tries}: give the number of plans to train, 1 or more")
    if settings.objective == "memory":
        raise UsageError(
            f"try={tries}, objective=memory: trials measure time; leave --try out, or choose another objective"
        )
    workers, node = settings.workers or cluster.num_workers, cluster.groups[0].workers
    if workers > node:
        raise UsageError(
            f"--try starts workers on this machine alone, and {workers} workers of cluster {cluster.name!r} are on "
            f"several nodes of {node}: give --workers {node}, or leave --try out"
        )
    # A cluster that comes with Stretto is of other machines, unless this one has as many accelerators.
    if settings.cluster in names() and torch.accelerator.device_count() < workers:
        raise UsageError(
            f"--try trains on this machine, which is not the cluster {cluster.name!r}: measure this one with stretto "
            "calibrate, and give --cluster cluster.toml"
        )
    if (file := TRIALS.beside(settings.cluster)) is not None:
        check_file(file)
        TRIALS.read(file)
    fork_server.prepare()


def measure_plans(
    settings: PlanSettings, objective: Objective, model: Costed, prices: Prices, tell: Callable[[int], object]
) -> MeasuredPlan:
    """Try plans, keep what that measures beside the cluster's file, and choose one.

    `tell` is called with the number of rounds that have begun.
    """
    if model.trained is None:
        raise UsageError(
            f"--try trains, and stretto train has no data for {model.name}: give --data path/to/file.py:function, or "
            "leave --try out"
        )
    assert settings.tries is not None, "the caller has made sure that there are trials"
    trials = trials_of(prices.problem, objective, prices, settings.tries)
    side_by_side(trials, prices)
    begin, load = time.perf_counter(), busy_cores()
    remarks = doubts(max(trial.plan.candidate.workers for trial in trials), load or 0.0)
    try:
        outcome = try_plans(trials, model.trained, tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; nothing has been written") from None
    chosen, seconds = outcome.chosen, time.perf_counter() - begin
    kept: dict[str, Any] = {
        "tried_on": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "try_seconds": seconds,
        "try_noise": outcome.noise,
        "remarks": remarks,
        "tried": [
            row(trial.plan)
            | {"measured_seconds": trial.seconds, "reported_seconds": trial.reported}
            | {"allowed": trial.allowed, "chosen": trial is chosen}
            for trial in outcome.trials
        ],
    }
    if (file := TRIALS.beside(settings.cluster)) is not None:
        cluster = prices.problem.cluster.name
        about = {"model": model.name, "optimizer": model.optimizer, "cluster": cluster, "load": load}
        TRIALS.write(file, key_of(settings, model, prices), about | kept)
    failures = [row(trial.plan) | {"reason": trial.failure} for trial in outcome.failed]
    measured = {
        "seconds_per_step": chosen.reported,
        "noise": chosen.noise,
        "rounds": len(chosen.choosing) + len(chosen.reporting),
    }
    facts = {
        "measured_seconds": chosen.reported,
        "not_tried": failures,
        "tried_file": None if file is None else str(file),
    }
    return MeasuredPlan(chosen.plan, measured, facts | kept)


def try_plans(trials: Sequence[Trial], trained: Mapping[str, Any], on_round: Callable[[int], object]) -> TrialsOutcome:
    """Train plans by turns, on processes of their own, and choose one; `trained` are the settings of their model.

    A trial that has failed before stays out. `on_round` is called with the number of rounds that have begun. Raises
    UsageError if no plan can be tried; all processes have ended when it returns or raises.
    """
    from stretto.study.trial_processes import ready

    def turn(trial: Trial) -> float:
        on_round(1 + len(trial.choosing) + len(trial.reporting))
        return groups[trial].turn()

    with ready(trials, trained) as groups:
        return contest(trials, turn)


def doubts(workers: int, load: float) -> list[str]:
    """What makes times on this machine doubtful just now: few cores, or other programs that compute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remarks = []
    if cores < workers and not torch.accelerator.is_available():
        remarks.append(f"{workers} workers share {cores} cores: on more cores the order may be another")
    if load > BUSY:
        remarks.append(
            f"other programs kept {load:.1f} of {cores} cores busy: times are too long, and may be out of order"
        )
    return remarks


def find_measured(
    settings: PlanSettings, objective: Objective, model: Costed, prices: Prices, best: Plan
) -> MeasuredPlan | None:
    """The fastest of the plans that were tried before and that this problem allows; None if there is none.

    `best` is the best plan by predictions.
    """
    file = TRIALS.beside(settings.cluster)
    if file is None or model.trained is None or settings.objective == "memory":
        return None
    record = TRIALS.read(file).get(key_of(settings, model, prices))
    found = None if record is None else best_tried(record["tried"], prices.problem, objective, prices)
    if record is None or found is None:
        return None
    plan, trial = found
    seconds = trial["reported_seconds"]
    known = {(each["method"], each["workers"], each["sharding"]) for each in record["tried"]}
    c = best.candidate
    promises = best.value < plan.value / plan.seconds * seconds
    untried = promises and (str(c), c.workers, c.shard) not in known
    return MeasuredPlan(plan, {"seconds_per_step": seconds, "tried_on": record["tried_on"]}, {
        "measured_seconds": seconds, "tried": [{**each, "chosen": each is trial} for each in record["tried"]],
        "not_tried": [], "try_seconds": 0.0, "try_noise": record["try_noise"], "remarks": record["remarks"],
        "tried_on": record["tried_on"], "tried_file": str(file),
        "untried": {"method": str(c), "workers": c.workers, "predicted_seconds": best.seconds} if untried else None,
    })  # fmt: skip


def key_of(settings: PlanSettings, model: Costed, prices: Prices) -> str:
    """What trials of a problem are kept under: digests of the user's functions and data are part of it."""
    assert model.trained is not None, "the caller has made sure that it can be trained"
    assert model.resolved is not None, "whatever can be trained has settings"
    return problem_key(prices.problem, settings.objective, model.trained, model.resolved.sources)


def describe(facts: Mapping[str, Any]) -> list[str | list[tuple[str, ...]]]:
    """A table of the plans that were tried, and what their times are worth."""
    rows: list[tuple[str, ...]] = [("tried", "axes", "predicted", "measured", "again", "")]
    tried = sorted(facts["tried"], key=lambda each: float(each["measured_seconds"]) / int(each["batch_size"]))
    for each in tried:
        note = "chosen" if each["chosen"] else "" if each["allowed"] else "not among the choices"
        seconds = (each["predicted_seconds"], each["measured_seconds"], each["reported_seconds"])
        rows.append((each["method"], describe_way(each), *map(duration, seconds), note))
    rows += [
        (each["method"], describe_way(each), duration(each["predicted_seconds"]), "failed", "", each["reason"])
        for each in facts["not_tried"]
    ]
    took = f"tried for {facts['try_seconds']:.0f} s" if facts["try_seconds"] else f"tried on {facts['tried_on']}"
    apart = f"chosen by the first measurement; the two lie up to {percent(facts['try_noise'])} apart"
    said = [f"{took}; {apart}", *facts["remarks"]]
    if not tried[0]["allowed"]:
        said.append("the fastest is not among the choices that the options leave: leave them out to have it chosen")
    if untried := facts.get("untried"):
        said.append(
            f"{untried['method']} on {untried['workers']} workers was not tried, and is predicted to take "
            f"{duration(untried['predicted_seconds'])}: --try N measures anew"
        )
    if facts["tried_file"] is not None:
        said.append(f"trials are kept in {facts['tried_file']}")
    return [rows, "", *said]


def describe_way(tried: Mapping[str, Any]) -> str:
    """The axes of a plan that are longer than one, and its sharding."""
    words = describe_axes(tried["data_parallel"], tried["pipeline"], tried["tensor"], tried["space"])
    words += [] if tried["sharding"] == "none" else [tried["sharding"]]
    return ", ".join(words) or "one worker"
