"""Predictions corrected by whole steps that were measured on this machine, one way to divide the work at a time.

What is measured of layers and collectives one by one misses what happens between them: processes that wait for the
later one, caches that others have filled. So of each way one plan, its probe, is trained for some seconds, and the
predictions of all plans that divide the work in that way are multiplied by the ratio of its seconds.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.methods import BASELINE
from stretto.options.kinds import check_kind, check_values, naming
from stretto.plan import Candidate, Objective, Plan, Problem, candidates
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.measurement_cache import MeasurementCache, Record, key_of
from stretto.plan.plan_file import training_settings
from stretto.plan.problem import SHARDS
from stretto.plan.refine import simulate_if_short
from stretto.plan.trials import Trial, TrialFailedError, play, row, whole
from stretto.plan.ways import LOCAL, ONE_WORKER, PIPELINE, PROBED, WAYS, ways_of
from stretto.study.trial_processes import TrialGroup, count_bytes, ready

MICROBATCHES = 2  # of a probe, for each of its workers
ROUNDS = 6  # turns of each plan, by turns with the others; in the first the processes warm up
TOLD = ROUNDS + 1  # what `tell` is called with at the end, when bytes have been counted, too
MEASURED = dict.fromkeys(("seconds", "spread", "bytes"), float | None)
KINDS: Mapping[str, Any] = {"plan": dict[str, Any], "failure": str | None, **MEASURED}


def with_measured_steps(
    problem: Problem,
    trained: Mapping[str, Any],
    key: str,
    tell: Callable[[int], object],
    *,
    file: Path | None,
    anew: bool = False,
) -> Problem:
    """The problem with the ratios of measured to predicted seconds and bytes, by way to divide the work.

    `trained` are the settings of its model, `key` what its layers were measured under. What `file` holds is not
    measured again, unless `anew` or the plans to measure have changed. Raises UsageError for a damaged file.
    """
    workers = min(problem.cluster.num_workers, os.cpu_count() or 1)
    plans = probes(problem, workers)

    def measure() -> Record:
        # Together, as a machine's speed drifts: times of other moments would be compared with those of these.
        memory = min(problem.cluster.device(worker).memory for worker in range(workers))
        return measure_steps(plans, trained, memory, tell)

    def is_usable(known: Record) -> bool:
        return not anew and all(
            way in known and "spread" in known[way] and known[way]["plan"] == identity(plan)
            for way, plan in plans.items()
        )

    found = STEPS.find(file, key_of({"layers": key, "workers": workers}), measure, is_usable)
    ratios = {way: found[way]["seconds"] / plan.seconds for way, plan in plans.items() if not found[way]["failure"]}
    failures = {way: found[way]["failure"] for way in plans if way not in ratios}
    doubts = tuple(f"no step could be measured on this machine, {way}: {why}" for way, why in failures.items())
    byte_ratios = {way: found[way]["bytes"] / max(plans[way].bytes) for way in ratios}
    spreads = {way: found[way]["spread"] for way in ratios}
    cluster = replace(problem.cluster, doubts=(*problem.cluster.doubts, *doubts))
    return problem.but(ratios=ratios, byte_ratios=byte_ratios, spreads=spreads, cluster=cluster)


def probes(problem: Problem, workers: int) -> dict[str, Plan]:
    """The plan to measure for each way on so many workers; without those that the problem cannot have.

    They do not depend on the limits of a problem, nor on earlier ratios: other limits need no other measurements.
    """
    batch = max(problem.batch_sizes)
    tensors = (1,) if problem.whole_layers else (1, *problem.tensor_costs)
    methods = (method for method in PROBED.values() if method != PROBED[LOCAL] or not problem.why_no_heads(method))
    every = problem.but(
        workers=workers, batch_sizes=(batch,), methods=(BASELINE, *methods), recompute=("none",), shards=SHARDS,
        pipelines=None, data_parallels=None, tensors=tensors, spaces=((1, 1), (workers, 1)),
        microbatches=None, stages=None, all_workers=False, ratios={}, byte_ratios={}, spreads={},
    )  # fmt: skip
    prices, fitting = Prices(every), list(candidates(every))
    chosen = {way: nearest(fitting, way, workers) for way in WAYS}
    plans = {way: None if c is None else plan_of(c, Objective(), prices) for way, c in chosen.items()}
    return {way: simulate_if_short(plan, prices) for way, plan in plans.items() if plan is not None}


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


def identity(plan: Plan) -> dict[str, Any]:
    """What a plan is, without what it is predicted to take."""
    return {name: value for name, value in row(plan).items() if name != "predicted_seconds"}


def measure_steps(
    plans: Mapping[str, Plan], trained: Mapping[str, Any], memory: float, tell: Callable[[int], object]
) -> Record:
    """The seconds of a step of each plan, and bytes of its fullest worker; None if it cannot be trained, and why.

    `tell` is called with the number of rounds that have ended; to count the bytes is the last one.
    """
    found: Record = {}
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
            turns = trial.choosing[1:]
            seconds = None if trial.failure else statistics.median(turns)
            usual = sorted(turns)[1:-1]  # one disturbed turn says nothing of the others
            found[way] = {
                "plan": identity(trial.plan),
                "seconds": seconds,
                "spread": None if seconds is None else (usual[-1] - usual[0]) / 2 / seconds,
                "bytes": num_bytes.get(trial),
                "failure": trial.failure,
            }
    return found


def most_bytes(trials: Iterable[Trial], trained: Mapping[str, Any]) -> dict[Trial, float]:
    """The most bytes that tensors take in a process of each trial that has not failed; marks those that fail now."""
    found = {}
    with ExitStack() as stack:
        groups = {
            trial: stack.enter_context(TrialGroup(training_settings(trial.plan, trained), count_bytes))
            for trial in whole([*trials])
        }
        for trial, group in groups.items():
            try:
                found[trial] = max(group.hear())
            except TrialFailedError as error:
                trial.failure = f"{error}"
    return found


def check(record: Mapping[str, Any]) -> None:
    """Raise UsageError or KeyError for what `measure_steps` does not give."""
    for way, each in record.items():
        with naming(way):
            check_values("measured", each, KINDS)
            if not each["failure"]:
                check_kind("seconds", each["seconds"], float)
            _ = each["plan"]["method"]


STEPS = MeasurementCache(".steps.json", "steps", "steps that stretto plan measured", "they are measured again", check)
