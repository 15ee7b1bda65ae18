"""What training costs on this machine, measured: FLOPs, layer times, rates, messages, all-reduces."""

from stretto.measure.counting import faking
from stretto.measure.layer_flops import layer_costs
from stretto.measure.layer_times import with_times
from stretto.measure.step_flops import NOTES, Accounting, Costs, measure

__all__ = ["NOTES", "Accounting", "Costs", "faking", "layer_costs", "measure", "with_times"]
