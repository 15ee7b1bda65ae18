"""Which plans are tried on real processes, which is chosen by its measured times, and what is kept. No processes here.

The rounds are divided into two sets, alternately. One chooses, the other one is reported: a plan that was chosen
because its turns happened to be fast is not reported with them. So the second set decides nothing, not even which plans
take further turns.

A cluster's file cluster.toml has cluster.tried.json beside it: the last trials of each problem, which is a model with
its data, loss and optimizer and the choices that a plan has, on one machine. A later plan of the same problem goes by
them. Only what was measured together is compared, so that new trials replace the former ones.
"""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from stretto.errors import StrettoError, UsageError
from stretto.mesh import Mesh
from stretto.methods import BASELINE
from stretto.options.kinds import check_values
from stretto.plan.branch_and_bound import Plan, plan_of, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.measurement_cache import MeasurementCache, key_of
from stretto.plan.objective import Objective
from stretto.plan.places import IN_ORDER, placements
from stretto.plan.plan_file import choices
from stretto.plan.problem import Problem
from stretto.plan.refine import simulate_if_short
from stretto.plan.search_space import Candidate, candidates

POOL = 48  # plans, by closed forms, that the ones to try are taken from
SAME_AXES, TWIN = 1.15, 1.5  # a plan counts as so many times slower for each that is taken and resembles it
ROUNDS, MORE = 6, 6  # rounds of all plans; at most so many more of the fastest ones if they are close
CLOSE = 1.03  # plans that take at most so many times as long as the fastest are close to it
HOPELESS = 1.5  # a plan that takes more than so many times as long as the fastest takes no turn after the first two


class TrialFailedError(StrettoError):
    """A plan could not be trained; the message says why."""


@dataclass(eq=False)
class Trial:
    """A plan and its turns on real processes: seconds of a step in each, in the two sets of rounds.

    A plan that is not `allowed` lies outside the problem's limits: it is measured and never chosen. `failure` says why
    it could not be trained.
    """

    plan: Plan
    allowed: bool = True
    choosing: list[float] = field(default_factory=list)
    reporting: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median seconds of a step in the rounds that choose."""
        return statistics.median(self.choosing)

    @property
    def reported(self) -> float:
        """The median seconds of a step in the other rounds: unbiased, even of the plan that was chosen."""
        return statistics.median(self.reporting)

    @property
    def value(self) -> float:
        """The objective's value at `seconds`, to which it is proportional; less is better."""
        return self.plan.value / self.plan.seconds * self.seconds

    @property
    def noise(self) -> float:
        """How far the two sets of rounds lie apart, as a share."""
        return abs(self.seconds / self.reported - 1)


@dataclass(frozen=True)
class TrialsOutcome:
    """The trials that came to their end, those that `failed`, and the one that is chosen: none takes less `seconds`."""

    trials: tuple[Trial, ...]
    failed: tuple[Trial, ...]
    chosen: Trial

    @property
    def noise(self) -> float:
        """How far the two sets of rounds lie apart: the largest share among the plans that were not hopeless."""
        return max((trial.noise for trial in self.trials if len(trial.choosing) > 1), default=self.chosen.noise)


def trials_of(problem: Problem, objective: Objective, prices: Prices, number: int) -> list[Trial]:
    """Trials of the single worker, which comes first, and of the `number` most promising other plans.

    The single worker is left out where it does not fit into memory.
    """
    single = single_worker(problem, objective, prices)
    plain = None if single is None else single.candidate._replace(placement=IN_ORDER)
    allowed = any(candidate._replace(placement=IN_ORDER) == plain for candidate in candidates(problem))

    def another(c: Candidate) -> bool:
        """Whether it is another plan: the single worker is no faster if it accumulates gradients, or recomputes."""
        simple = c.method == BASELINE and c.recompute == "none"
        return c._replace(placement=IN_ORDER) != plain and (not allowed or c.workers > 1 or simple)

    others = search(problem, objective, keep=POOL, prices=prices, among=another).plans
    exact = [simulate_if_short(plan, prices) for plan in promising(others, 2 * number)]
    chosen = [Trial(plan) for plan in promising(sorted(exact, key=lambda plan: plan.value), number)]
    if single is None:
        return chosen
    return [Trial(simulate_if_short(single, prices), allowed=allowed), *chosen]


def single_worker(problem: Problem, objective: Objective, prices: Prices) -> Plan | None:
    """Plain training on one worker, with the best of the batch sizes; None if it does not fit into memory."""
    plans = (
        plan_of(Candidate(1, Mesh(), batch, BASELINE, placement=placement), objective, prices)
        for batch, placement in product(problem.batch_sizes, placements(problem.cluster, Mesh(), 1))
    )
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)


def promising(plans: Sequence[Plan], number: int) -> list[Plan]:
    """The `number` plans to try, of some that are sorted by value.

    Predictions of plans on the same axes err together, and those of twins most of all. So a plan counts as SAME_AXES
    times slower for each that is taken on the same axes, and as TWIN times slower for each of those that has its method
    and is sharded as it is: twins differ in micro-batches, recomputation, or when weights are gathered.
    """
    left, taken = list(plans), list[Plan]()
    while left and len(taken) < number:
        best = min(left, key=lambda plan: plan.value * resemblance(plan.candidate, taken))
        left.remove(best)
        taken.append(best)
    return taken


def resemblance(candidate: Candidate, taken: Sequence[Plan]) -> float:
    """How many times slower a candidate counts because of plans that are taken already."""
    factor = 1.0
    for other in (plan.candidate for plan in taken):
        if (other.pipeline, other.mesh) == (candidate.pipeline, candidate.mesh):
            factor *= TWIN if way_of(other) == way_of(candidate) else SAME_AXES
    return factor


def way_of(candidate: Candidate) -> tuple[str, bool]:
    """The method, which is plain training on a single stage, and whether weights are sharded."""
    return BASELINE if candidate.stages == 1 else candidate.method, candidate.shard != "none"


def side_by_side(trials: Sequence[Trial], prices: Prices) -> None:
    """Mark trials as failed that do not fit into the workers' memory beside those before them."""
    free = min(prices.places_of(Candidate(1, Mesh(), 1)).memory)
    for trial in trials:
        needed = max(trial.plan.bytes)
        if needed > free:
            trial.failure = (
                f"it needs {needed / 1e9:.3g} GB on a worker, and the plans before it, which are kept in memory "
                f"meanwhile, leave {free / 1e9:.3g} GB: try fewer"
            )
        else:
            free -= needed


def contest(trials: Sequence[Trial], turn: Callable[[Trial], float]) -> TrialsOutcome:
    """Let plans take turns, in rounds of changing order, and choose one.

    `turn` lets a plan train for a moment and returns its seconds of a step; if it raises TrialFailedError, the others
    go on. Raises UsageError if no plan that is allowed comes to its end.
    """
    for pair in range(0, ROUNDS + MORE, 2):
        if pair == 0:
            playing = whole(trials)
        elif pair < ROUNDS:
            playing = within(HOPELESS, trials)
        elif len(playing := within(CLOSE, [trial for trial in trials if trial.allowed])) < 2:
            break
        for number in (pair, pair + 1):
            play(in_order(whole(playing), number), turn, number)
    ended, failed = whole(trials), tuple(trial for trial in trials if trial.failure)
    allowed = [trial for trial in ended if trial.allowed]
    if not allowed:
        reasons = "; ".join(dict.fromkeys(f"{trial.plan.candidate}: {trial.failure}" for trial in failed))
        raise UsageError(f"no plan could be tried: {reasons}. Leave --try out to plan by predictions alone")
    return TrialsOutcome(tuple(ended), failed, min(allowed, key=lambda trial: trial.value))


def play(trials: Sequence[Trial], turn: Callable[[Trial], float], number: int) -> None:
    """One round: those of even number choose, the others are reported."""
    for trial in trials:
        try:
            (trial.reporting if number % 2 else trial.choosing).append(turn(trial))
        except TrialFailedError as error:
            trial.failure = f"{error}"


def in_order(trials: Sequence[Trial], number: int) -> list[Trial]:
    """The order of a round: another plan begins each time, and every other pair of rounds goes backwards."""
    shift = number // 2 % len(trials) if trials else 0
    turned = [*trials[shift:], *trials[:shift]]
    return turned[::-1] if number % 2 else turned


def whole(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that have not failed."""
    return [trial for trial in trials if not trial.failure]


def within(factor: float, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that take at most `factor` times as long as the fastest allowed one, by the rounds that choose."""
    running = whole(trials)
    fastest = min((trial.value for trial in running if trial.allowed), default=float("inf"))
    return [trial for trial in running if trial.value <= factor * fastest]


# -- what is kept of them ---------------------------------------------------------------------------------------------

Tried = Mapping[str, Any]  # one plan that was tried, as `row` writes it
# Fields of a problem that are no choices.
COSTS = ("costs", "tensor_costs", "form_costs", "cluster", "ratios", "byte_ratios", "spreads")
PRICED = (*COSTS, "heads", "named_heads", "no_heads", "sides")
KINDS: Mapping[str, Any] = {"tried": list[dict[str, Any]], "tried_on": str, "try_noise": float, "remarks": list[str]}
TRIED: Mapping[str, Any] = {
    **dict.fromkeys(("method", "sharding", "planned_method"), str),
    **dict.fromkeys(("workers", "pipeline", "data_parallel", "tensor", "stages", "microbatches", "batch_size"), int),
    **dict.fromkeys(("losses", "ahead", "per_worker"), int), "space": tuple[int, int], "bounds": list[int],
    "placement": list[int], "recompute": bool | str, "sequence_parallel": bool, "allowed": bool,
    **dict.fromkeys(("predicted_seconds", "measured_seconds", "reported_seconds"), float),
}  # fmt: skip
NEEDED = ("method", "workers", "bounds", "predicted_seconds", "measured_seconds", "reported_seconds", "allowed")


def problem_key(problem: Problem, goal: str, trained: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Sixteen characters that differ if the problem does: its choices, the model's settings, functions, or the machine.

    `sources` are digests of the user's functions and data. What is priced may change: another calibration is no other
    problem.
    """
    choices = {each.name: getattr(problem, each.name) for each in fields(problem) if each.name not in PRICED}
    return key_of(
        {"choices": choices, "goal": goal, "trained": dict(trained), "sources": dict(sources), "host": platform.node()}
    )


def row(plan: Plan) -> dict[str, Any]:
    """A plan's method and axes, and its predicted seconds of a step, as plain data."""
    c, facts = plan.candidate, choices(plan)
    facts["data_parallel"] = facts.pop("data")
    return {
        **facts,
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


def check(record: Mapping[str, Any]) -> None:
    """Raise ValueError, KeyError or UsageError for trials that are not as `row` and the command write them."""
    check_values("trials", record, KINDS)
    for tried in record["tried"]:
        check_values("tried", tried, TRIED)
        candidate_of(tried)
        _ = [tried[name] for name in NEEDED]


TRIALS = MeasurementCache(
    ".tried.json", "problems", "trials that stretto plan --try wrote", "plans go by predictions", check
)


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
    return simulate_if_short(best, prices), trial
