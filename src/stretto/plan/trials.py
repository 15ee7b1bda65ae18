"""Which plans are tried on real processes, and which of them is chosen by its measured times. No processes here.

The turns of a plan are divided into two sets, alternately. One chooses, the other one is reported: a plan that was
chosen because its turns happened to be fast is not reported with them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stretto.errors import StrettoError, UsageError
from stretto.mesh import Mesh
from stretto.methods import BASELINE
from stretto.plan.branch_and_bound import Plan, plan_of, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Objective
from stretto.plan.problem import Problem
from stretto.plan.refine import MOST, actions, simulated
from stretto.plan.search_space import Candidate, candidates

POOL = 48  # plans, by closed forms, that the ones to try are taken from
SAME_AXES, SAME_METHOD = 1.15, 1.5  # a plan counts as so many times slower for each that is taken and resembles it
ROUNDS, MORE = 6, 6  # rounds of all plans; at most so many more where the two sets of rounds do not agree
HOPELESS = 1.5  # a plan that is so many times slower than another in both of the first rounds takes no further turn


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

    def value(self, seconds: float) -> float:
        """The objective's value for measured seconds of a step, less is better: it is proportional to them."""
        return self.plan.value / self.plan.seconds * seconds

    @property
    def noise(self) -> float:
        """How far the medians of the two sets lie apart, as a share."""
        return abs(statistics.median(self.choosing) / statistics.median(self.reporting) - 1)


@dataclass(frozen=True)
class Outcome:
    """The trials that came to their end, those that `failed`, and the one that is chosen.

    Where the two sets of rounds named different plans to the end, they are `tied`: then all rounds choose, and all are
    reported.
    """

    trials: tuple[Trial, ...]
    failed: tuple[Trial, ...]
    chosen: Trial
    tied: bool

    def seconds(self, trial: Trial) -> float:
        """The measured seconds of a step that are reported."""
        return statistics.median([*trial.choosing, *trial.reporting] if self.tied else trial.reporting)

    @property
    def noise(self) -> float:
        """How far the two sets of rounds lie apart: the largest share among the plans."""
        return max(trial.noise for trial in self.trials)


def trials_of(problem: Problem, objective: Objective, prices: Prices, number: int) -> list[Trial]:
    """Trials of the single worker, which comes first, and of the `number` most promising other plans.

    The single worker is left out where it does not fit into memory.
    """
    single = single_worker(problem, objective, prices)
    pool = search(problem, objective, keep=POOL, prices=prices).plans
    others = [plan for plan in pool if single is None or plan.candidate != single.candidate]
    exact = [predicted(plan, prices) for plan in promising(others, 2 * number)]
    chosen = [Trial(plan) for plan in promising(sorted(exact, key=lambda plan: plan.value), number)]
    if single is None:
        return chosen
    return [Trial(predicted(single, prices), allowed=single.candidate in candidates(problem)), *chosen]


def predicted(plan: Plan, prices: Prices) -> Plan:
    """The plan with simulated seconds, unless its schedule is too long for that."""
    return plan if actions(plan) > MOST else simulated(plan, prices)


def single_worker(problem: Problem, objective: Objective, prices: Prices) -> Plan | None:
    """Plain training on one worker, with the best of the batch sizes; None if it does not fit into memory."""
    plans = (plan_of(Candidate(1, Mesh(), batch, BASELINE), objective, prices) for batch in problem.batch_sizes)
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)


def promising(plans: Sequence[Plan], number: int) -> list[Plan]:
    """The `number` plans to try, of some that are sorted by value.

    Predictions of plans on the same axes err together, and twins that differ in micro-batches alone most of all. So a
    plan counts as SAME_AXES times slower for each that is taken on the same axes and with the same sharding, and as
    SAME_METHOD times slower for each of those that has its method, too.
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
        if axes_of(other) == axes_of(candidate):
            factor *= SAME_METHOD if other.method == candidate.method else SAME_AXES
    return factor


def axes_of(candidate: Candidate) -> tuple[object, ...]:
    """What decides which predictions err together."""
    return candidate.pipeline, candidate.mesh, candidate.shard


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


def contest(trials: Sequence[Trial], turn: Callable[[Trial], float]) -> Outcome:
    """Let plans take turns, in rounds of changing order, and choose one.

    `turn` lets a plan train for a moment and returns its seconds of a step; if it raises TrialFailedError, the others
    go on. Raises UsageError if no plan that is allowed comes to its end.
    """
    for number in range(ROUNDS):
        play(in_order(contenders(trials), number), turn, number)
    for pair in range(ROUNDS, ROUNDS + MORE, 2):
        named = finalists(trials)
        if len(named) < 2:
            break
        for number in (pair, pair + 1):
            play(in_order(whole(named), number), turn, number)
    return outcome(trials)


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


def contenders(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that take further turns: all until both sets have one, then those that are not hopeless."""
    running = whole(trials)
    if any(not trial.reporting for trial in running):
        return running
    limit = HOPELESS * min(
        (max(map(trial.value, turns(trial))) for trial in running if trial.allowed), default=float("inf")
    )
    return [trial for trial in running if min(map(trial.value, turns(trial))) <= limit]


def turns(trial: Trial) -> Iterator[float]:
    """Seconds of a step in all turns of a trial."""
    yield from trial.choosing
    yield from trial.reporting


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The plans that the two sets of rounds name: one where they agree."""
    allowed = [trial for trial in whole(trials) if trial.allowed]
    named = {
        id(trial): trial
        for trial in (
            min(allowed, key=lambda trial: trial.value(statistics.median(trial.choosing)), default=None),
            min(allowed, key=lambda trial: trial.value(statistics.median(trial.reporting)), default=None),
        )
        if trial is not None
    }
    return list(named.values())


def outcome(trials: Sequence[Trial]) -> Outcome:
    """The plan that both sets of rounds name; where they do not agree, the fastest over all rounds."""
    ended, failed = whole(trials), tuple(trial for trial in trials if trial.failure)
    named = finalists(trials)
    if not named:
        reasons = "; ".join(dict.fromkeys(f"{trial.plan.candidate}: {trial.failure}" for trial in failed))
        raise UsageError(f"no plan could be tried: {reasons}. Leave --try out to plan by predictions alone")
    tied = len(named) > 1
    allowed = [trial for trial in ended if trial.allowed]
    chosen = min(allowed, key=lambda trial: trial.value(statistics.median(turns(trial)))) if tied else named[0]
    return Outcome(tuple(ended), failed, chosen, tied)
