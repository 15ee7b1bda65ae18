"""Predict the best few plans again: by simulating their schedules instead of closed forms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from stretto.cost.head_costs import StageHeads, laid_out, uses_in
from stretto.cost.layer_sums import LayerTimes
from stretto.cost.layer_table import ModelCosts
from stretto.cost.stage_prediction import StageTimes
from stretto.cost.step_prediction import Pricer, mean_turn, turn_seconds
from stretto.cost.worker_memory import peak_bytes
from stretto.methods import Method, method
from stretto.plan.branch_and_bound import Plan, bytes_of_workers, search
from stretto.plan.candidate_costs import Prices, Trained
from stretto.plan.closed_forms import TERMS, StageTable
from stretto.plan.objective import Objective
from stretto.plan.search_space import candidates
from stretto.plan.ways import byte_correction, spread_of
from stretto.schedule import Rules, Schedule

AHEAD = (1, 2, 3, 4, 6, 8)  # forwards that plans may run ahead for each worker above
EQUAL_WITHIN = 0.2  # the largest spread within which plans count as equal
EQUAL = 48  # plans of so many workers among which the plainest one is looked for
MOST = 4000  # actions of a turn; the simulation of so many takes no longer than a search


def refined(plans: Sequence[Plan], prices: Prices) -> tuple[Plan, ...]:
    """The plans by their simulated seconds, best first; unchanged if a schedule has more than MOST actions.

    Where messages are late at random, each plan with the number of forwards ahead that is fastest.
    """
    if any(actions(plan) > MOST for plan in plans):
        return tuple(plans)
    best = (
        min((simulated(variant, prices) for variant in running_ahead(plan, prices)), key=lambda each: each.value)
        for plan in plans
    )
    return tuple(sorted(best, key=lambda plan: (plan.value, plan.formula)))


def plainest(best: Plan, objective: Objective, prices: Prices) -> Plan:
    """The plainest plan whose predicted value is within the spread of the steps that the best plan's rests on.

    At most EQUAL_WITHIN of it: steps that lie further apart were disturbed, and say nothing of others. With the fewest
    workers, then the first in the order of `Candidate.order`. Where no step was measured, the plan of one worker if
    that is as good: closed forms, by which plans are found, may have been better than the simulation.
    """
    limit = best.value * (1 + min(spread_of(best.candidate, prices.problem.spreads) or 0.0, EQUAL_WITHIN))
    counts = sorted({c.workers for c in candidates(prices.problem)})
    for workers in counts if limit > best.value else {1} & {*counts}:
        found = search(prices.problem, objective, keep=EQUAL, prices=prices, among=lambda c: c.workers == workers)  # noqa: B023
        for plan in sorted(found.plans, key=lambda plan: plan.candidate.order):
            exact = simulate_if_short(plan, prices)
            if exact.value <= limit:
                return exact
    return best


def running_ahead(plan: Plan, prices: Prices) -> Iterator[Plan]:
    """The plan, and the same with more forwards ahead, as far as they fit into memory; only if messages are late."""
    yield plan
    c = plan.candidate
    late = any(link.lateness for link in prices.places_of(c).ahead)
    if c.planning.ahead is None or not late:
        return
    for ahead in (count for count in AHEAD if count < c.microbatches):
        chosen = c._replace(ahead=ahead)
        num_bytes = bytes_of_workers(chosen, plan.bounds, prices.tables(chosen))
        if all(taken <= memory for taken, memory in zip(num_bytes, prices.places_of(c).memory, strict=True)):
            yield replace(plan, candidate=chosen, bytes=tuple(num_bytes))


def simulate_if_short(plan: Plan, prices: Prices) -> Plan:
    """The plan with simulated seconds, unless its schedule is too long for that."""
    return plan if actions(plan) > MOST else simulated(plan, prices)


def actions(plan: Plan) -> int:
    """The approximate number of actions of a turn."""
    return 3 * plan.candidate.stages * plan.candidate.microbatches


def simulated(plan: Plan, prices: Prices) -> Plan:
    """The plan with the simulated seconds of a turn in the long run, and the bytes of a walk through its actions."""
    laid = LaidOut.of(plan, prices)
    seconds = turn_seconds(pricer_of(plan, prices, laid)) * prices.correction(plan.candidate)
    taken = byte_correction(plan.candidate, prices.problem.byte_ratios)
    num_bytes = tuple(taken * peak for peak in peaks(plan, prices, laid))
    return replace(plan.lasting(seconds), bytes=num_bytes, simulated=True)


def standard_error(plan: Plan, prices: Prices) -> float | None:
    """Of a plan's seconds, where they are a mean over draws of late messages."""
    if not plan.simulated or not any(link.lateness for link in prices.places_of(plan.candidate).ahead):
        return None
    mean = mean_turn(pricer_of(plan, prices, LaidOut.of(plan, prices)))
    return mean.error * prices.correction(plan.candidate)


class LaidOut(NamedTuple):
    """A plan's method, schedule and rules, and the costs of its layers to each process that shares them.

    `ends` are the stages' bounds, the loss in the last one; `heads` are the heads behind stages, and the weights that
    stages send each other.
    """

    chosen: Method
    schedule: Schedule
    rules: Rules
    costs: ModelCosts
    ends: Sequence[int]
    heads: StageHeads

    @classmethod
    def of(cls, plan: Plan, prices: Prices) -> "LaidOut":
        """What a plan is laid out as."""
        c, problem = plan.candidate, prices.problem
        chosen, costs = method(str(c)), problem.costs
        ends = [*plan.bounds[:-1], len(costs.layers)]
        reach = chosen.reach(c.stages)
        heads = problem.heads_of(c.method) if c.gradients.heads or c.gradients.predicted else None
        behind = laid_out(heads, reach, costs, plan.bounds)
        schedule, rules = chosen.plan(c.stages, c.pipeline, ties=behind.ties, reads=behind.reads)
        shared = prices.borrowing(uses_in(costs, plan.bounds, rules, copies=prices.as_large_models))
        rows = replace(shared.problem.counted_costs(c.form) or shared.problem.costs, layers=shared.rows(c.form))
        return cls(chosen, schedule, rules, rows, ends, behind)


def peaks(plan: Plan, prices: Prices, laid: LaidOut) -> tuple[float, ...]:
    """The peak bytes of tensors on each worker of the pipeline, sharded among replicas as the plan says.

    Those of closed forms where float32 masters are kept, which the walk does not know.
    """
    c, problem = plan.candidate, prices.problem
    if problem.masters:
        return plan.bytes
    whole = peak_bytes(*laid[:-1], c.examples, optimizer=problem.optimizer, behind=laid.heads)
    peak = list(whole)
    if prices.has_buckets(c):
        gradients = prices.sizes(c.form, c.examples).gradients
        for s, span in enumerate(pairwise(plan.bounds)):
            peak[c.worker_of(s)] += float(gradients[span])
    if c.shard == "none":
        return tuple(peak)
    replicated = prices.stages_at(c._replace(shard="none"), plan.bounds)
    for s, (one, sharded) in enumerate(zip(replicated, prices.stages_at(c, plan.bounds), strict=True)):
        peak[c.worker_of(s)] -= float(one.static_bytes - sharded.static_bytes)
    return tuple(peak)


def pricer_of(plan: Plan, prices: Prices, laid: LaidOut) -> Pricer:
    """The Pricer of a plan: its simulated actions take what its price tables say of them."""
    c = plan.candidate
    sizes, share = prices.sizes(c.form, c.examples), prices.message_share(c.form)
    works, tables = prices.trained_at(c, plan.bounds), prices.stages_at(c, plan.bounds)
    stages = [
        StageTimes(
            compute=with_communication(work, stage, is_sharded=c.shard != "none"),
            learn=float(work.learn),
            input=share * float(sizes.input[i]),
            output=share * float(sizes.output[j]),
            gradients=float(work.gradients),
        )
        for (i, j), work, stage in zip(pairwise(plan.bounds), works, tables, strict=True)
    ]
    workers = prices.places_of(c).workers
    return Pricer(laid.chosen, laid.schedule, laid.rules, workers, stages, laid.heads.weights)


def with_communication(work: Trained, stage: StageTable, *, is_sharded: bool) -> LayerTimes[float]:
    """Seconds of a stage's actions with all that effects add to them, and with the communication of its replicas."""
    forward, backward, to_input, to_weights = work[:4]
    for more in stage.passes.values():
        forward, backward = forward + more.forward, backward + more.backward
        to_input, to_weights = to_input + more.backward - more.deferrable, to_weights + more.deferrable
    update = (stage.update if is_sharded else work.update) + stage.all_reduce
    return LayerTimes(*map(float, (forward, backward, to_input, to_weights, update, work.accumulate)))


def terms(plan: Plan, prices: Prices) -> Mapping[str, float]:
    """The terms of a plan's seconds, which add up to them.

    For a simulated plan they are those of the busiest worker in a turn. "messages" is how much longer the turn is than
    with free messages; "bubble" is how long the busiest worker would wait even then.
    """
    if not plan.simulated:
        return prices.terms(plan.candidate, plan.bounds)
    pricer = pricer_of(plan, prices, LaidOut.of(plan, prices))
    without_messages = turn_seconds(replace(pricer, workers=pricer.workers.silent))
    stages = prices.stages_at(plan.candidate, plan.bounds)
    workloads = [work_terms(worker, pricer, stages) for worker in range(pricer.workers.number)]
    busiest = max(workloads, key=lambda work: sum(work.values()))
    uncorrected = plan.seconds / prices.correction(plan.candidate)
    waits = {
        "messages": uncorrected - without_messages,
        "bubble": without_messages - sum(busiest.values()),
        "correction": plan.seconds - uncorrected,
    }
    return dict.fromkeys(TERMS, 0.0) | busiest | waits


def work_terms(worker: int, pricer: Pricer, stages: Sequence[StageTable]) -> dict[str, float]:
    """The seconds of a worker's actions in a turn by term, without sending and receiving messages."""
    seconds = dict.fromkeys(TERMS, 0.0)
    for action in pricer.schedule.body[worker]:
        action_seconds, stage = pricer.parts[pricer.work(action)], stages[action.stage]
        seconds["runtime"] += action_seconds.runtime
        if action.kind == "U":
            seconds["all-reduce"] += float(stage.all_reduce)
            seconds["update"] += action_seconds.stage - float(stage.all_reduce) + action_seconds.copy
        elif action.kind == "C":
            seconds["computing again"] += action_seconds.stage
        else:
            again = {"B": 1.0, "I": 0.5, "W": 0.5}.get(action.kind, 0.0) * float(stage.recompute)
            if action.stage in pricer.rules.recompute:  # in actions of its own
                again = 0.0
            own = action_seconds.stage
            for term, more in stage.passes.items():
                part = float(more.of(action.kind))
                own, seconds[term] = own - part, seconds[term] + part
            seconds["computing again"] += again
            seconds["computing"] += own - again
    return seconds
