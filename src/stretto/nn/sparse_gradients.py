"""Gradients that may be sparse, as those of nn.Embedding(sparse=True): what torch does with dense ones only."""

from torch import Tensor


def entries(gradient: Tensor) -> Tensor:
    """A dense gradient as it is, a sparse one as its rows, each once: they have the same norm."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def plus(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients; torch adds a sparse one to a dense one, not the other way round."""
    return other + one if one.is_sparse else one + other
