"""What training costs on this machine, measured: FLOPs, layer times, rates, messages, all-reduces."""

from typing import TYPE_CHECKING

from stretto.options.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto.measure.flops import NOTES, Accounting, Costs, measure
    from stretto.measure.layer_counting import faking
    from stretto.measure.layer_flops import layer_costs
    from stretto.measure.layer_times import with_times

__all__ = ["NOTES", "Accounting", "Costs", "faking", "layer_costs", "measure", "with_times"]

_HOMES = {
    "NOTES": "stretto.measure.flops",
    "Accounting": "stretto.measure.flops",
    "Costs": "stretto.measure.flops",
    "faking": "stretto.measure.layer_counting",
    "layer_costs": "stretto.measure.layer_flops",
    "measure": "stretto.measure.flops",
    "with_times": "stretto.measure.layer_times",
}

__getattr__ = lazy_names(__name__, _HOMES)  # counting a network's layers needs no Trainer
