"""What training costs on this machine, measured: FLOPs, layer times, rates, messages, all-reduces."""

from stretto.measure.layer_times import with_times
from stretto.measure.layers import faking, layer_costs
from stretto.measure.step_costs import NOTES, Accounting, Costs, measure

__all__ = ["NOTES", "Accounting", "Costs", "faking", "layer_costs", "measure", "with_times"]
