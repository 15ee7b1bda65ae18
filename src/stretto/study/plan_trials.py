"""Trials of plans on this machine's processes, as `stretto plan --try` makes them."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.cost import Cluster
from stretto.errors import UsageError
from stretto.measure.busy_cores import busy_cores
from stretto.plan.plan_file import training
from stretto.plan.trials import Trial, TrialFailedError, TrialsOutcome, contest, whole
from stretto.plan.tried_file import row
from stretto.study.trial_processes import TrialGroup

BUSY = 0.5  # cores that other programs keep busy: from here on times are said to be too long


@dataclass(frozen=True)
class Tried:
    """What trials came to, the seconds that they took, and remarks on the machine that doubt them.

    `load` are the cores that other programs kept busy when they began; None where the system does not tell.
    """

    outcome: TrialsOutcome
    seconds: float
    remarks: tuple[str, ...]
    load: float | None

    @property
    def measured(self) -> dict[str, Any]:
        """What is measured of the plan that is chosen, for its file."""
        chosen = self.outcome.chosen
        return {
            "seconds_per_step": chosen.reported,
            "noise": chosen.noise,
            "rounds": len(chosen.choosing) + len(chosen.reporting),
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The plans that were tried, with predicted and measured seconds of a step, as plain data.

        `measured_seconds` are those by which one was chosen, `reported_seconds` those of the other rounds.
        """
        return [
            row(trial.plan) | {
                "measured_seconds": trial.seconds, "reported_seconds": trial.reported,
                "allowed": trial.allowed, "chosen": trial is self.outcome.chosen,
            }
            for trial in self.outcome.trials
        ]  # fmt: skip

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The plans that could not be tried, and why."""
        return [row(trial.plan) | {"reason": trial.failure} for trial in self.outcome.failed]


def refuse_elsewhere(cluster: Cluster, workers: int, *, by_name: bool) -> None:
    """Raise UsageError where plans are for workers that this machine cannot start.

    A cluster that comes with Stretto, chosen `by_name`, is of other machines unless this one has as many accelerators.
    """
    import torch

    node = cluster.groups[0].workers
    if workers > node:
        raise UsageError(
            f"--try starts workers on this machine alone, and {workers} workers of cluster {cluster.name!r} are on "
            f"several nodes of {node}: give --workers {node}, or leave --try out"
        )
    if by_name and torch.accelerator.device_count() < workers:
        raise UsageError(
            f"--try trains on this machine, which is not the cluster {cluster.name!r}: measure this one with stretto "
            "calibrate, and give --cluster cluster.toml"
        )


def try_plans(trials: Sequence[Trial], trained: Mapping[str, Any], on_round: Callable[[int], object]) -> Tried:
    """Train plans by turns, on processes of their own, and choose one; `trained` are the settings of their model.

    A trial that has failed before stays out. `on_round` is called with the number of rounds that have begun. Raises
    UsageError if no plan can be tried; all processes have ended when it returns or raises.
    """
    begin = time.perf_counter()
    load = busy_cores()
    remarks = doubts(max(trial.plan.candidate.workers for trial in trials), load or 0.0)

    def turn(trial: Trial) -> float:
        on_round(1 + len(trial.choosing) + len(trial.reporting))
        return groups[trial].turn()

    with ready(trials, trained) as groups:
        outcome = contest(trials, turn)
    return Tried(outcome, time.perf_counter() - begin, remarks, load)


@contextlib.contextmanager
def ready(trials: Sequence[Trial], trained: Mapping[str, Any]) -> Iterator[Mapping[Trial, TrialGroup]]:
    """The processes of each trial that has not failed, with full pipelines; marks the trials whose processes fail."""
    with contextlib.ExitStack() as stack:
        groups = {trial: stack.enter_context(TrialGroup(training(trial.plan, trained))) for trial in whole(trials)}
        for step in (TrialGroup.await_ready, TrialGroup.fill):
            for trial in whole(trials):
                try:
                    step(groups[trial])
                except TrialFailedError as error:
                    trial.failure = f"{error}"
        yield groups


def doubts(workers: int, load: float) -> tuple[str, ...]:
    """What makes times on this machine doubtful just now: few cores, or other programs that compute."""
    import torch

    cores = available_cores()
    crowded = cores < workers and not torch.accelerator.is_available()
    few = f"{workers} workers share {cores} cores: on more cores the order may be another" if crowded else ""
    busy = (
        f"other programs kept {load:.1f} of {cores} cores busy: times are too long, and may be out of order"
        if load > BUSY
        else ""
    )
    return tuple(filter(None, (few, busy)))


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
