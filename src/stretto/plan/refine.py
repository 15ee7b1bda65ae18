"""The best few plans again, by the forecast's simulation of their schedules instead of closed forms."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.cost.forecast import Pricer, silent, turn_seconds
from stretto.cost.predict import StageTimes, stage_times
from stretto.methods import method
from stretto.plan.branch_and_bound import Plan
from stretto.plan.candidate_costs import TERMS, Prices, StageTable
from stretto.plan.search_space import Candidate
from stretto.plan.share import shared

MOST = 4000  # actions of a turn whose simulation takes no longer than a search


def refined(plans: Sequence[Plan], prices: Prices) -> tuple[Plan, ...]:
    """The plans, best first; unchanged where a schedule has so many actions that its simulation would take long."""
    if any(actions(plan) > MOST for plan in plans):
        return tuple(plans)
    return tuple(sorted((simulated(plan, prices) for plan in plans), key=lambda plan: (plan.value, plan.formula)))


def actions(plan: Plan) -> int:
    """About how many actions a turn has."""
    return 3 * plan.candidate.stages * plan.candidate.microbatches


def simulated(plan: Plan, prices: Prices) -> Plan:
    """The plan with the time of a turn in the long run."""
    seconds = turn_seconds(pricer_of(plan, prices))
    share = seconds / plan.formula
    money = None if plan.money is None else plan.money * share
    value = plan.value if plan.value == max(plan.bytes) else plan.value * share
    return replace(plan, seconds=seconds, value=value, money=money, simulated=True)


def pricer_of(plan: Plan, prices: Prices) -> Pricer:
    """What every action of a plan takes: as `forecast` prices it, and what replicas and parts of stages add."""
    c, problem = plan.candidate, prices.problem
    workers, chosen, costs = prices.where(c).workers, method(str(c)), problem.costs
    ends = [*plan.bounds[:-1], len(costs.layers)]  # the loss is the last stage's
    tied = costs.tied(ends)
    schedule, rules = chosen.plan(c.stages, c.pipeline, ties=tuple(tied))
    sides = (*prices.sides, *[0] * (len(costs.layers) - len(prices.sides)))
    rows = replace(costs, layers=tuple(shared(costs.layers, c.mesh.tensor, c.mesh.space, sides)))
    has_head = set(rules.reach.heads[:-1])
    times = stage_times(
        rows, ends, problem.cluster, c.examples * len(workers.ranks[0]),
        workers=[workers.ranks[schedule.worker_of[s]] for s in range(c.stages)], dtype=prices.dtype,
        optimizer=problem.optimizer,
        heads=[problem.heads[end - 1] if problem.heads and s in has_head else None
               for s, end in enumerate(plan.bounds[1:])],
        silent=silent(rules, c.stages),
    )  # fmt: skip
    parts = prices.at(c, plan.bounds)
    stages = [with_parts(each, x, c, masters=problem.masters) for each, x in zip(times, parts, strict=True)]
    return Pricer(chosen, schedule, rules, workers, stages, tied)


def with_parts(times: StageTimes, x: StageTable, c: Candidate, *, masters: bool) -> StageTimes:
    """The times of a stage with what replicas tell each other, and what processes do that share it."""
    downs, alone = float(x.downs + x.regather), times.compute
    compute = alone._replace(
        forward=alone.forward + float(x.ups + x.gather),
        backward=alone.backward + downs,
        input_gradient=alone.input_gradient + downs,
        update=alone.update * (2 if masters else 1) / (1 if c.shard == "none" else c.mesh.data) + float(x.reduce),
    )
    return replace(times, compute=compute)


def terms(plan: Plan, prices: Prices) -> Mapping[str, float]:
    """What a plan's seconds are made of: they add up to them.

    Of a simulated one: what the busiest worker does in a turn. Messages are what the turn is longer than it would be
    if messages took no time and kept nobody busy; the bubble is what the busiest worker would wait even then.
    """
    if not plan.simulated:
        return prices.terms(plan.candidate, plan.bounds)
    pricer = pricer_of(plan, prices)
    unheard = turn_seconds(replace(pricer, workers=pricer.workers.silent))
    stages = prices.at(plan.candidate, plan.bounds)
    every = [done_by(worker, pricer, stages) for worker in range(pricer.workers.number)]
    busiest = max(every, key=lambda each: sum(each.values()))
    waits = {"messages": plan.seconds - unheard, "bubble": unheard - sum(busiest.values())}
    return dict.fromkeys(TERMS, 0.0) | busiest | waits


def done_by(worker: int, pricer: Pricer, stages: Sequence[StageTable]) -> dict[str, float]:
    """What a worker does in a turn, ends of messages left out, in the terms of closed forms."""
    found = dict.fromkeys(TERMS, 0.0)
    for action in pricer.schedule.body[worker]:
        parts, x = pricer.parts[pricer.work(action)], stages[action.stage]
        found["runtime"] += parts.runtime
        if action.kind == "U":
            found["all-reduce"] += float(x.reduce)
            found["update"] += parts.stage - float(x.reduce) + parts.copy
        elif action.kind == "C":
            found["computing again"] += parts.stage
        else:
            inside, gathers = beside(action.kind, x)
            found["inside stages"] += inside
            found["gathering weights"] += gathers
            found["computing"] += parts.stage - inside - gathers
    return found


def beside(kind: str, x: StageTable) -> tuple[float, float]:
    """Of a forward's or a backward's time, what processes that share the stage tell each other, and what is gathered.

    Where a backward is I and W, I has all of it.
    """
    if kind == "F":
        return float(x.ups), float(x.gather)
    return (float(x.downs), float(x.regather)) if kind in "BI" else (0.0, 0.0)
