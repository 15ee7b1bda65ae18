"""The interpreter that needs no tensors: time on paper."""

from stretto.simulate.simulate import Durations, Timeline, simulate, unit_costs
from stretto.simulate.steady import period
from stretto.simulate.times import stage_times

__all__ = ["Durations", "Timeline", "period", "simulate", "stage_times", "unit_costs"]
