"""stretto plan --try: plans that are trained for some seconds before one is chosen, and what is kept of that."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import aligned, progress, rising, writing_to
from stretto.errors import UsageError
from stretto.files.destinations import check_file
from stretto.settings.planning import PlanSettings

if TYPE_CHECKING:
    from stretto.cost import Cluster
    from stretto.plan import Objective, Plan, Problem
    from stretto.plan.candidate_costs import Prices
    from stretto.study.model_costs import Costed


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was chosen by measured times, what is `measured` of it, and what the command tells of the trials."""

    plan: "Plan"
    measured: dict[str, Any]
    facts: dict[str, Any]


def check_trials(settings: PlanSettings, cluster: "Cluster") -> None:
    """Raise UsageError for trials that cannot be made or kept; begin what they need."""
    if settings.tries is None:
        return
    from stretto.cost.cluster_file import names
    from stretto.plan.tried_file import read
    from stretto.processes import fork_server
    from stretto.study.plan_trials import refuse_elsewhere

    assert settings.cluster is not None, "the caller has made sure that there is one"
    if settings.tries < 1:
        raise UsageError(f"try={settings.tries}: give the number of plans to train, 1 or more")
    if settings.objective == "memory":
        raise UsageError(
            f"try={settings.tries}, objective=memory: trials measure time; leave --try out, or choose another objective"
        )
    by_name = settings.cluster in names()
    refuse_elsewhere(cluster, settings.workers or cluster.num_workers, by_name=by_name)
    if (file := file_of(settings)) is not None:
        check_file(file)
        read(file)
    fork_server.prepare()


def tried_or_kept(
    settings: PlanSettings, problem: "Problem", objective: "Objective", model: "Costed", best: "Plan",
    prices: "Prices", *, silent: bool,
) -> MeasuredPlan | None:  # fmt: skip
    """With --try, the plan that trials choose; without, the fastest of those that were tried before.

    None if there are no trials of this problem. `best` is the best plan by predictions.
    """
    if settings.tries is not None:
        return tried(settings, problem, objective, model, prices, silent=silent)
    return kept(settings, problem, objective, model, best, prices)


def tried(
    settings: PlanSettings, problem: "Problem", objective: "Objective", model: "Costed", prices: "Prices",
    *, silent: bool,
) -> MeasuredPlan:  # fmt: skip
    """Try plans, keep what that measures beside the cluster's file, and choose one."""
    from stretto.plan.trials import ROUNDS, side_by_side, trials_of
    from stretto.plan.tried_file import keep
    from stretto.study.plan_trials import try_plans

    if model.trained is None:
        raise UsageError(
            f"--try trains, and stretto train has no data for {model.name}: give --data path/to/file.py:function, or "
            "leave --try out"
        )
    assert settings.tries is not None
    trials = trials_of(problem, objective, prices, settings.tries)
    side_by_side(trials, prices)
    with progress("trials", ROUNDS, silent=silent) as bar:
        try:
            found = try_plans(trials, model.trained, rising(bar.advance, ROUNDS))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; nothing has been written") from None
    facts: dict[str, Any] = {
        "measured_seconds": found.measured["seconds_per_step"],
        "tried": found.rows,
        "not_tried": found.failures,
        "try_seconds": found.seconds,
        "try_noise": found.outcome.noise,
        "remarks": list(found.remarks),
        "tried_on": date(),
        "tried_file": None,
    }
    file = file_of(settings)
    if file is not None:
        record = {key: facts[key] for key in ("tried_on", "try_seconds", "try_noise", "remarks", "tried")}
        about: dict[str, Any] = {
            "model": model.name, "optimizer": problem.optimizer, "cluster": problem.cluster.name, "load": found.load,
        }  # fmt: skip
        with writing_to(file):
            keep(file, key_of(problem, settings.objective, model), about | record)
        facts["tried_file"] = str(file)
    return MeasuredPlan(found.outcome.chosen.plan, found.measured, facts)


def kept(
    settings: PlanSettings, problem: "Problem", objective: "Objective", model: "Costed", best: "Plan",
    prices: "Prices",
) -> MeasuredPlan | None:  # fmt: skip
    """The fastest of the plans that were tried before and that this problem allows; None if there is none."""
    from stretto.plan.tried_file import best_tried, read

    file = file_of(settings)
    if file is None or model.trained is None or settings.objective == "memory" or not file.is_file():
        return None
    record = read(file).get(key_of(problem, settings.objective, model))
    found = None if record is None else best_tried(record["tried"], problem, objective, prices)
    if record is None or found is None:
        return None
    plan, trial = found
    seconds = trial["reported_seconds"]
    measured = {"seconds_per_step": seconds, "tried_on": record["tried_on"]}
    known = {(each["method"], each["workers"], each["sharding"]) for each in record["tried"]}
    c = best.candidate
    promises = best.value < plan.value / plan.seconds * seconds
    untried = promises and (str(c), c.workers, c.shard) not in known
    rows = [{**each, "chosen": each is trial} for each in record["tried"]]
    return MeasuredPlan(plan, measured, {
        "measured_seconds": seconds, "tried": rows, "not_tried": [], "try_seconds": 0.0,
        "try_noise": record["try_noise"], "remarks": record["remarks"],
        "tried_on": record["tried_on"], "tried_file": str(file),
        "untried": {"method": str(c), "workers": c.workers, "predicted_seconds": best.seconds} if untried else None,
    })  # fmt: skip


def file_of(settings: PlanSettings) -> Path | None:
    """The file of trials beside that of the cluster; None for a cluster that comes with Stretto."""
    from stretto.plan.beside_cluster import file_beside

    return file_beside(settings.cluster or "", ".tried.json")


def key_of(problem: "Problem", goal: str, model: "Costed") -> str:
    """What trials of a problem are kept under: digests of the user's functions and data are part of it."""
    from stretto.plan.tried_file import problem_key

    assert model.trained is not None, "the caller has made sure that it can be trained"
    assert model.resolved is not None, "whatever can be trained has settings"
    return problem_key(problem, goal, model.trained, model.resolved.sources)


def date() -> str:
    """The time of day with its date and zone, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def in_words(facts: Mapping[str, Any]) -> str:
    """A table of the plans that were tried, and what their times are worth."""
    from stretto.report.units import duration, percent

    lines: list[tuple[str, ...]] = [("tried", "axes", "predicted", "measured", "again", "")]
    tried = sorted(facts["tried"], key=lambda each: float(each["measured_seconds"]) / int(each["batch_size"]))
    for each in tried:
        note = "chosen" if each["chosen"] else "" if each["allowed"] else "not among the choices"
        seconds = (each["predicted_seconds"], each["measured_seconds"], each["reported_seconds"])
        lines.append((each["method"], axes_in_words(each), *map(duration, seconds), note))
    lines += [
        (each["method"], axes_in_words(each), duration(each["predicted_seconds"]), "failed", "", each["reason"])
        for each in facts["not_tried"]
    ]
    took = f"tried for {facts['try_seconds']:.0f} s" if facts["try_seconds"] else f"tried on {facts['tried_on']}"
    apart = f"chosen by the first measurement; the two lie up to {percent(facts['try_noise'])} apart"
    said = [f"{took}; {apart}", *facts["remarks"]]
    if not tried[0]["allowed"]:
        said.append("the fastest is not among the choices that the options leave: leave them out to have it chosen")
    if facts.get("untried"):
        untried = facts["untried"]
        said.append(
            f"{untried['method']} on {untried['workers']} workers was not tried, and is predicted to take "
            f"{duration(untried['predicted_seconds'])}: --try N measures anew"
        )
    if facts["tried_file"] is not None:
        said.append(f"trials are kept in {facts['tried_file']}")
    return "\n".join([aligned(lines), "", *said])


def axes_in_words(tried: Mapping[str, Any]) -> str:
    """The axes of a plan that are longer than one, and its sharding."""
    height, width = tried["space"]
    lengths = {
        "pipeline": str(tried["pipeline"]),
        "data": str(tried["data_parallel"]),
        "tensor": str(tried["tensor"]),
        "space": f"{height}x{width}" if height * width > 1 else "1",
    }
    words = [f"{axis} {length}" for axis, length in lengths.items() if length != "1"]
    sharding = [] if tried["sharding"] == "none" else [tried["sharding"]]
    return ", ".join([*words, *sharding]) or "one worker"
