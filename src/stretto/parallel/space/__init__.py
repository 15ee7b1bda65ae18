"""Spatial parallelism: an image's rows and columns on several processes."""

from stretto.parallel.space.preparation import collect, scatter, spatial

__all__ = ["collect", "scatter", "spatial"]
