"""How replicas of a pipeline stay together: choices, by name. No torch."""

from stretto.sync.choice import AllReduce, DiLoCo, FullyShard, LocalSGD, ParameterServer, Sync, find
from stretto.sync.order import Order

__all__ = ["AllReduce", "DiLoCo", "FullyShard", "LocalSGD", "Order", "ParameterServer", "Sync", "find"]
