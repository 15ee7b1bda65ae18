"""How replicas of a pipeline stay together: choices, by name. No torch."""

from stretto.sync.choice import AllReduce, DiLoCo, LocalSGD, Sync, find

__all__ = ["AllReduce", "DiLoCo", "LocalSGD", "Sync", "find"]
