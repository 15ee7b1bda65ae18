"""The best few plans again, by simulation of their schedules instead of closed forms."""

from collections.abc import Sequence
from dataclasses import replace

from stretto.plan.price import Prices
from stretto.plan.search import Plan
from stretto.schedule import Action

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
    """The plan with the makespan of a minibatch, or the period of a turn where minibatches follow without a drain.

    All messages take as long as the longest.
    """
    from stretto.methods import method
    from stretto.simulate import period, simulate

    c = plan.candidate
    stages = prices.at(c, plan.bounds)

    def duration(action: Action) -> float:
        x = stages[action.stage]
        whole = x.backward - x.again
        late = x.late if c.clock.split and action.stage else 0.0
        times = {"F": x.forward, "C": x.again, "B": whole, "I": whole - late, "W": late, "U": x.reduce + x.update}
        return float(times.get(action.kind, 0.0))

    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    latency = max(float(x.message) for x in stages)
    if c.clock.drains:
        seconds = simulate(schedule, rules, 1, duration, latency=latency).makespan
    else:
        seconds = period(schedule, rules, duration, latency=latency)
    share = seconds / plan.formula
    money = None if plan.money is None else plan.money * share
    value = plan.value if plan.value == max(plan.bytes) else plan.value * share
    return replace(plan, seconds=seconds, value=value, money=money, simulated=True)
