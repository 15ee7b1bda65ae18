"""Spatial parallelism: the rows and columns of an image on several processes."""

from stretto.parallel.space.preparation import collect, refuse_whole, scatter, spatial, whole

__all__ = ["collect", "refuse_whole", "scatter", "spatial", "whole"]
