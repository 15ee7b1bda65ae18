"""Hides gradients from an optimizer's own step, which leaves parameters without one as they are."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In this block the parameters have no gradients; after it they have them again."""
    hidden = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient
