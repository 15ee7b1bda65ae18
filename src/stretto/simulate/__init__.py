"""The interpreter that needs no tensors: time on paper."""

from stretto.simulate.network import Link, Network
from stretto.simulate.noise import Noise
from stretto.simulate.simulate import Durations, simulate, unit_costs
from stretto.simulate.steady import period
from stretto.simulate.timeline import Timeline
from stretto.simulate.times import stage_times

__all__ = ["Durations", "Link", "Network", "Noise", "Timeline", "period", "simulate", "stage_times", "unit_costs"]
