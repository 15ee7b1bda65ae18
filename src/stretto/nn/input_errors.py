"""Turns errors of a user's module or loss on its inputs into UsageErrors that say which inputs did not fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from stretto.errors import StrettoError, UsageError
from stretto.options.user_errors import error_place

KINDS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
_ROWS: ContextVar[Callable[[], str] | None] = ContextVar("_ROWS", default=None)
LONGEST = 600  # characters of the original error that a message quotes


def is_misfit(error: BaseException) -> bool:
    """Whether an error may come from inputs that do not fit: not out of memory, a lost process, or a StrettoError."""
    if isinstance(error, StrettoError | torch.OutOfMemoryError | dist.DistError) or not isinstance(error, KINDS):
        return False
    return "gloo" not in str(error) and "nccl" not in str(error).lower()


def error_text(error: BaseException) -> str:
    """An error's type and text, cut after LONGEST characters, and the line of the user's code that it comes from."""
    text = str(error).strip()
    text = text if text.endswith("..") else text.removesuffix(".")
    return f"{type(error).__name__}: {text[:LONGEST]}{' ...' * (len(text) > LONGEST)}{error_place(error)}"


@contextmanager
def naming_rows(where: Callable[[], str]) -> Iterator[None]:
    """In this block, `advice_on` an index out of range says where the examples are that it may come from."""
    token = _ROWS.set(where)
    try:
        yield
    finally:
        _ROWS.reset(token)


def _told_rows() -> str:
    where = _ROWS.get()
    return "" if where is None else f" (in {where()})"


def advice_on(error: BaseException) -> str:
    """A sentence for a message where the cause is known: an index, a class, a batch of one, a change in place."""
    if isinstance(error, IndexError) and str(error).startswith("index"):  # list indices and targets begin otherwise
        return f"A value may lie outside an embedding's range, 0 to num_embeddings - 1{_told_rows()}. "
    if isinstance(error, IndexError) and str(error).startswith("Target"):
        return (
            "Cross entropy takes classes from 0 to the number of the model's outputs less one, and -100 for none: give "
            f"padding this target, or a loss that leaves yours out{_told_rows()}. "
        )
    if isinstance(error, RuntimeError) and str(error).startswith("Expected target size"):
        return (
            "Cross entropy takes output [N, K, ...] and classes [N, ...]. For tokens, output [N, T, V] and target "
            "[N, T], take stretto.losses.token_cross_entropy (--loss token_cross_entropy), or leave --loss out. "
        )
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
        return (
            "A tensor that the backward needs was changed in place: in a forward (clone it first), or since, while "
            "micro-batches were on their way (call flush() before you change a model). "
        )
    if isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel"):
        return (
            "A batch norm needs two examples or more in each micro-batch: leave out a last, short batch "
            "(DataLoader(..., drop_last=True)), or cut minibatches into fewer micro-batches. "
        )
    return ""


@contextmanager
def explaining_misfits(what: Callable[[], str], remedy: str) -> Iterator[None]:
    """In this block a misfit becomes UsageError with the text `what()`, the original error and the `remedy`."""
    try:
        yield
    except Exception as error:
        if not is_misfit(error):
            raise
        raise UsageError(f"{what()}: {error_text(error)}. {advice_on(error)}{remedy}") from error
