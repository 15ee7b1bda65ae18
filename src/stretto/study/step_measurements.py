"""Whole steps measured on this machine, of one plan for each way to divide the work; see `stretto.plan.whole_steps`."""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.files.destinations import check_file
from stretto.options.kinds import check_kind, check_values, naming
from stretto.plan import Plan, Problem, beside_cluster
from stretto.plan.plan_file import training
from stretto.plan.trials import Trial, TrialFailedError, play, whole
from stretto.plan.tried_file import row
from stretto.plan.whole_steps import memory_groups, probes
from stretto.study.plan_trials import ready
from stretto.study.trial_processes import TrialGroup, count_bytes

ROUNDS = 6  # turns of each plan, by turns with the others; in the first the processes warm up
TOLD = ROUNDS + 1  # what `tell` is called with at the end, when bytes have been counted, too
WORD = "steps"  # of the file, above its records
KINDS: Mapping[str, Any] = {
    "plan": dict[str, Any], "seconds": float | None, "bytes": float | None, "failure": str | None,
}  # fmt: skip


def with_measured_steps(
    problem: Problem, trained: Mapping[str, Any], key: str, tell: Callable[[int], object],
    *, file: Path | None, anew: bool = False,
) -> Problem:  # fmt: skip
    """The problem with the ratios of measured to predicted seconds and bytes, by way to divide the work.

    `trained` are the settings of its model, `key` what its layers were measured under. What `file` holds is not
    measured again, unless `anew` or the plans to measure have changed. Raises UsageError for a damaged file.
    """
    workers = min(problem.cluster.num_workers, os.cpu_count() or 1)
    plans = probes(problem, workers)
    known = {} if file is None else read(file)
    name = beside_cluster.key_of({"layers": key, "workers": workers})
    found = {} if anew else known.get(name, {})
    missing = {way: plan for way, plan in plans.items() if not fits(found.get(way), plan)}
    if missing:
        if file is not None:
            check_file(file)
        # Together, as a machine's speed drifts: times of other moments would be compared with those of these.
        memory = min(problem.cluster.device(worker).memory for worker in range(workers))
        found = known[name] = measured(plans, trained, memory, tell)
        if file is not None:
            beside_cluster.write(file, WORD, known)
    ratios = {way: found[way]["seconds"] / plan.seconds for way, plan in plans.items() if not found[way]["failure"]}
    doubts = tuple(f"no step could be measured on this machine, {way}: {found[way]['failure']}"
                   for way in plans if way not in ratios)  # fmt: skip
    byte_ratios = {way: found[way]["bytes"] / max(plans[way].bytes) for way in ratios}
    cluster = replace(problem.cluster, doubts=(*problem.cluster.doubts, *doubts))
    return problem.but(ratios=ratios, byte_ratios=byte_ratios, cluster=cluster)


def fits(record: Mapping[str, Any] | None, plan: Plan) -> bool:
    """Whether a record is of this plan."""
    return record is not None and "bytes" in record and record["plan"] == identity(plan)


def identity(plan: Plan) -> dict[str, Any]:
    """What a plan is, without what it is predicted to take."""
    return {name: value for name, value in row(plan).items() if name != "predicted_seconds"}


def measured(
    plans: Mapping[str, Plan], trained: Mapping[str, Any], memory: float, tell: Callable[[int], object]
) -> dict[str, dict[str, Any]]:
    """The seconds of a step of each plan, and bytes of its fullest worker; None if it cannot be trained, and why.

    `tell` is called with the number of rounds that have ended; to count the bytes is the last one.
    """
    found: dict[str, dict[str, Any]] = {}
    together = memory_groups(plans, memory)
    for number, group in enumerate(together):
        trials = {way: Trial(plan) for way, plan in group.items()}
        with ready([*trials.values()], trained) as processes:

            def turn(trial: Trial, of: Mapping[Trial, TrialGroup] = processes) -> float:
                return of[trial].turn()

            for done in range(1, ROUNDS + 1):
                play(whole([*trials.values()]), turn, number=0)
                tell((number * TOLD + done) // len(together))
        num_bytes = most_bytes(trials.values(), trained)
        tell((number + 1) * TOLD // len(together))
        for way, trial in trials.items():
            found[way] = {
                "plan": identity(trial.plan),
                "seconds": None if trial.failure else statistics.median(trial.choosing[1:]),
                "bytes": num_bytes.get(trial),
                "failure": trial.failure,
            }
    return found


def most_bytes(trials: Iterable[Trial], trained: Mapping[str, Any]) -> dict[Trial, float]:
    """The most bytes that tensors take in a process of each trial that has not failed; marks those that fail now."""
    found = {}
    with ExitStack() as stack:
        groups = {
            trial: stack.enter_context(TrialGroup(training(trial.plan, trained), count_bytes))
            for trial in whole([*trials])
        }
        for trial, group in groups.items():
            try:
                found[trial] = max(group.hear())
            except TrialFailedError as error:
                trial.failure = f"{error}"
    return found


def read(file: Path) -> dict[str, Any]:
    """What was measured, by a digest of the layers and the workers; nothing if there is no file.

    Raises UsageError if it is damaged.
    """
    what, effect = "steps that stretto plan measured", "they are measured again"
    return beside_cluster.read(file, WORD, check, what=what, effect=effect)


def check(record: Mapping[str, Any]) -> None:
    """Raise UsageError or KeyError for what `measured` does not give."""
    for way, each in record.items():
        with naming(way):
            check_values("measured", each, KINDS)
            if not each["failure"]:
                check_kind("seconds", each["seconds"], float)
            _ = each["plan"]["method"]
