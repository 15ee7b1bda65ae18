"""The interpreter that needs no tensors: time on paper."""

from stretto.simulate.simulate import Durations, Timeline, simulate, unit_costs
from stretto.simulate.steady import period

__all__ = ["Durations", "Timeline", "period", "simulate", "unit_costs"]
