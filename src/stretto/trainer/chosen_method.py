"""The method that a Trainer was asked for: what "async" and "local" stand for is settled here, once and for all."""

from collections.abc import Callable, Sequence
from typing import Any

from stretto.errors import UsageError
from stretto.methods import Method, method
from stretto.methods.advice import advised
from stretto.methods.table import is_advised
from stretto.nn.group_norm import has_batch_norm
from stretto.optim.by_name import name_made_by


def chosen_method(asked: str | Method, optimizer: Callable[..., Any], stages: Sequence[Any]) -> Method:
    """The method, for this optimizer function and these stages."""
    if not is_advised(asked):
        return method(asked)
    return settled(asked, name_made_by(optimizer, stages), stages)


def settled(asked: str | Method, optimizer: str, stages: Sequence[Any]) -> Method:
    """The method, under an optimizer of this name: what `advised` says of these stages."""
    return advised(asked, optimizer, len(stages), whole=has_batch_norm(stages))


def refuse_hidden_norms(chosen: Method, pieces: int, stages: Sequence[Any]) -> None:
    """Raise UsageError where the method was chosen before it was known that stages, given as functions, have norms."""
    if chosen.advice is not None and not chosen.advice.whole and pieces > 1 and has_batch_norm(stages):
        raise UsageError(
            f"stages that are given as functions have batch norms, which normalise each of {pieces} micro-batches by "
            "itself: give stages as modules, so that the advice knows"
        )


def method_to_evaluate(asked: str | Method) -> Method:
    """The method of a Trainer that trains nothing: 1F1B in place of one that may want heads, or another optimizer.

    Evaluation goes through the stages alone, and what "async" and "local" stand for is not known without an optimizer.
    """
    chosen = None if is_advised(asked) else method(asked)
    return chosen if chosen is not None and chosen.synchronous else method("1f1b")
