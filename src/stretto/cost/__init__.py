"""What training costs: FLOPs, bytes, times and machines. Tables, clusters and predictions need no torch."""

from typing import TYPE_CHECKING, Any

from stretto.cost.cluster import Cluster, Device, Group, Link, Rate
from stretto.cost.cluster_file import find_cluster, read_cluster, write_cluster
from stretto.cost.layer_table import Affine, LayerCost, Measured, ModelCosts, Work
from stretto.cost.predict import StageTimes, durations_of, stage_times

if TYPE_CHECKING:
    from stretto.measure import NOTES, Accounting, Costs, faking, layer_costs, measure, with_times

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

_MEASURED = {"NOTES", "Accounting", "Costs", "faking", "layer_costs", "measure", "with_times"}  # now in stretto.measure


def __getattr__(name: str) -> Any:
    """What 0.1.0 had here and stands in `stretto.measure` now, which needs torch: imported when it is asked for."""
    if name not in _MEASURED:
        raise AttributeError(f"module 'stretto.cost' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("stretto.measure"), name)
