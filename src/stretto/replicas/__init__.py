"""How the replicas of a pipeline keep their weights together: strategies, by name. No torch."""

from stretto.replicas.parameter_server.tickets import Order
from stretto.replicas.sync_options import (
    AllReduce,
    DiLoCo,
    FullyShard,
    LocalSGD,
    ParameterServer,
    ShardOptimizer,
    Sync,
    find,
)

__all__ = [
    "AllReduce",
    "DiLoCo",
    "FullyShard",
    "LocalSGD",
    "Order",
    "ParameterServer",
    "ShardOptimizer",
    "Sync",
    "find",
]
