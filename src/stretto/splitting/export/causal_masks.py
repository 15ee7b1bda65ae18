"""Masks of attention in an exported graph, whatever their elements."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.modules import transformer

NAME = "_detect_is_causal_mask"  # what torch.nn's encoder and decoder ask before their first layer


@contextmanager
def masks_as_given() -> Iterator[None]:
    """In this block torch.nn's transformers do not look whether a mask is causal, which a graph could not decide.

    They use it as it is then: the same numbers, without the kernels that need no mask.
    """

    def hinted(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    original = getattr(transformer, NAME)
    setattr(transformer, NAME, hinted)
    try:
        yield
    finally:
        setattr(transformer, NAME, original)
