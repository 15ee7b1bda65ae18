"""Operator (tensor) parallelism: the weights of a layer on several processes."""

from stretto.parallel.operator.piece import norms
from stretto.parallel.operator.preparation import gather, tensor

__all__ = ["gather", "norms", "tensor"]
