"""What training costs: FLOPs, bytes, times and machines. Tables, clusters and predictions need no torch."""

from typing import TYPE_CHECKING, Any

from stretto.cost.cluster import Cluster, Device, Group, Link, Rate
from stretto.cost.cluster_file import find_cluster, read_cluster, write_cluster
from stretto.cost.predict import StageTimes, durations_of, stage_times
from stretto.cost.table import Affine, LayerCost, Measured, ModelCosts, Work

if TYPE_CHECKING:
    from stretto.cost.costs import NOTES, Accounting, Costs, measure
    from stretto.cost.layers import faking, layer_costs
    from stretto.cost.stopwatch import with_times

__all__ = [
    "NOTES",
    "Accounting",
    "Affine",
    "Cluster",
    "Costs",
    "Device",
    "Group",
    "LayerCost",
    "Link",
    "Measured",
    "ModelCosts",
    "Rate",
    "StageTimes",
    "Work",
    "durations_of",
    "faking",
    "find_cluster",
    "layer_costs",
    "measure",
    "read_cluster",
    "stage_times",
    "with_times",
    "write_cluster",
]

_HOMES = {
    "NOTES": "costs",
    "Accounting": "costs",
    "Costs": "costs",
    "measure": "costs",
    "faking": "layers",
    "layer_costs": "layers",
    "with_times": "stopwatch",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.cost' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"stretto.cost.{_HOMES[name]}"), name)
