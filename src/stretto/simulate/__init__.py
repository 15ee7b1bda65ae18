"""The interpreter without tensors: the times of actions and messages, and the memory that values take.

A latency delays a value on its way to another worker and keeps nobody busy. A link is LogGP's: its ends' shares of a
message are part of the actions around it, `travel` is what is left, and `gap` is how soon the next one may follow.
Late messages are drawn by a seed for each minibatch, so plans are compared on the same draws; such a simulation has
no period, and the mean over turns and draws takes its place.
"""

from stretto.schedule.pace import period
from stretto.simulate.memory import Ledger, ledgers
from stretto.simulate.network import Link, Network, Transport
from stretto.simulate.periodic import PeriodicTimeline, simulate_periodic
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
