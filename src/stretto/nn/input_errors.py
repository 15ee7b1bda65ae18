"""Errors of users' modules and losses on what they were given, told as what does not fit what."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from stretto.errors import StrettoError, UsageError

KINDS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
LONGEST = 600  # characters of an error's own text


def is_misfit(error: BaseException) -> bool:
    """Whether an error may come of tensors that do not fit: not of a lack of memory, a lost process, or Stretto."""
    if isinstance(error, StrettoError | torch.OutOfMemoryError | dist.DistError) or not isinstance(error, KINDS):
        return False
    return "gloo" not in str(error) and "nccl" not in str(error).lower()


def told(error: BaseException) -> str:
    """What an error says of itself, shortened."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text[:LONGEST]}{' ...' * (len(text) > LONGEST)}"


@contextmanager
def fitting(what: Callable[[], str], remedy: str) -> Iterator[None]:
    """A misfit in here becomes UsageError: `what` cannot be done, the error's own words, `remedy`."""
    try:
        yield
    except Exception as error:
        if not is_misfit(error):
            raise
        raise UsageError(f"{what()}: {told(error)}. {remedy}") from error
