"""How replicas of a pipeline stay together: choices, by name. No torch."""

from stretto.sync.choice import AllReduce, DiLoCo, FullyShard, LocalSGD, Sync, find

__all__ = ["AllReduce", "DiLoCo", "FullyShard", "LocalSGD", "Sync", "find"]
