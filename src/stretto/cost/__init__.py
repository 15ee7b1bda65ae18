"""The costs of training: FLOPs, bytes, seconds and clusters. Predictions from them need no torch."""

from stretto.cost.cluster import Cluster, Device, Group, Link, Rate
from stretto.cost.cluster_file import find_cluster, read_cluster, write_cluster
from stretto.cost.layer_table import Affine, LayerCost, Measured, ModelCosts, Work
from stretto.cost.stage_prediction import StageTimes, stage_times
from stretto.options.lazy_names import lazy_names

__all__ = [
    "NOTES", "Accounting", "Affine", "Cluster", "Costs", "Device", "Group", "LayerCost", "Link", "Measured",
    "ModelCosts", "Rate", "StageTimes", "Work", "faking", "find_cluster", "layer_costs", "measure",
    "read_cluster", "stage_times", "with_times", "write_cluster",
]  # fmt: skip

_MEASURED = ("NOTES", "Accounting", "Costs", "faking", "layer_costs", "measure", "with_times")

__getattr__ = lazy_names(__name__, dict.fromkeys(_MEASURED, "stretto.measure"))  # they moved there, and need torch
