"""What training costs on this machine, measured: FLOPs, layer times, rates, messages, all-reduces.

Rates belong to sorts of torch's operators. A layer's amounts are lines in the batch, from two runs on fake tensors;
storages are counted once along the chain. Layers that are alike run once. Networks without data are counted on meta
tensors (`layer_counting.py`), whose rows equal those of fakes, number by number. The FLOP counter does not know
attention on the CPU, so its own formula is registered.

Kernels (`kernels.py`): for a device that says what it attains, operators are counted one by one, as max(FLOPs, bytes)
of a layer's sum is less than the sum of its operators' maxima. Dtypes and memory formats are those that tensors have
while layers are counted. Autocast is that of GPUs, on the CPU (`gpu_autocast.py`).

Collectives are measured between rounds of work (`collective_times.py`), less the work alone: between work each
process waits for the later one, which a busy core wakes late.
"""

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
