"""What training costs on this machine, measured: FLOPs, layer times, rates, messages, all-reduces."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.measure.counting import faking
    from stretto.measure.layer_flops import layer_costs
    from stretto.measure.layer_times import with_times
    from stretto.measure.step_flops import NOTES, Accounting, Costs, measure

__all__ = ["NOTES", "Accounting", "Costs", "faking", "layer_costs", "measure", "with_times"]

_HOMES = {
    "NOTES": "step_flops",
    "Accounting": "step_flops",
    "Costs": "step_flops",
    "faking": "counting",
    "layer_costs": "layer_flops",
    "measure": "step_flops",
    "with_times": "layer_times",
}


def __getattr__(name: str) -> Any:
    """Import a name from its file on first use: counting a network's layers needs no Trainer."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.measure' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"stretto.measure.{_HOMES[name]}"), name)
