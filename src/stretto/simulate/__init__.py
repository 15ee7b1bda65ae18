"""The interpreter that needs no tensors: time on paper."""

from stretto.simulate.memory import Ledger, ledgers
from stretto.simulate.network import Link, Network
from stretto.simulate.noise import Noise
from stretto.simulate.periodic import Endless, endless
from stretto.simulate.simulator import Durations, simulate, unit_costs
from stretto.simulate.steady import period
from stretto.simulate.timeline import Timeline
from stretto.simulate.times import stage_times

__all__ = [
    "Durations",
    "Endless",
    "Ledger",
    "Link",
    "Network",
    "Noise",
    "Timeline",
    "endless",
    "ledgers",
    "period",
    "simulate",
    "stage_times",
    "unit_costs",
]
