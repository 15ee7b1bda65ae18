"""The interpreter without tensors: the times of actions and messages, and the memory that values take."""

from stretto.simulate.durations import action_durations
from stretto.simulate.memory import Ledger, ledgers
from stretto.simulate.network import Link, Network, Transport
from stretto.simulate.noise import Noise
from stretto.simulate.periodic import PeriodicTimeline, simulate_periodic
from stretto.simulate.simulator import Durations, simulate, unit_costs
from stretto.simulate.steady import period
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
