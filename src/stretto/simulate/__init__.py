"""The interpreter without tensors: the times of actions and messages, and the memory that values take."""

from stretto.simulate.memory import Ledger, ledgers
from stretto.simulate.network import Link, Network, Transport
from stretto.simulate.periodic import PeriodicTimeline, period, simulate_periodic
from stretto.simulate.simulator import Durations, Noise, action_durations, simulate, unit_costs
from stretto.simulate.timeline import Timeline

__all__ = [
    "Durations",
    "Ledger",
    "Link",
    "Network",
    "Noise",
    "PeriodicTimeline",
    "Timeline",
    "Transport",
    "action_durations",
    "ledgers",
    "period",
    "simulate",
    "simulate_periodic",
    "unit_costs",
]
