"""The costs of training: FLOPs, bytes, seconds and clusters. Predictions from them need no torch."""

from typing import TYPE_CHECKING, Any

from stretto.cost.cluster import Cluster, Device, Group, Link, Rate
from stretto.cost.cluster_file import find_cluster, read_cluster, write_cluster
from stretto.cost.layer_table import Affine, LayerCost, Measured, ModelCosts, Work
from stretto.cost.stage_prediction import StageTimes, durations_of, stage_times

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

_MEASURED = {
    "NOTES",
    "Accounting",
    "Costs",
    "faking",
    "layer_costs",
    "measure",
    "with_times",
}  # names that moved to stretto.measure


def __getattr__(name: str) -> Any:
    """Import a name that 0.1.0 had here from `stretto.measure`, on first use, as that needs torch."""
    if name not in _MEASURED:
        raise AttributeError(f"module 'stretto.cost' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("stretto.measure"), name)
