"""How the replicas of a pipeline keep their weights together: strategies, by name. No torch."""

from stretto.replicas.parameter_server.order import Order
from stretto.replicas.strategies import AllReduce, DiLoCo, FullyShard, LocalSGD, ParameterServer, Sync, find

__all__ = ["AllReduce", "DiLoCo", "FullyShard", "LocalSGD", "Order", "ParameterServer", "Sync", "find"]
