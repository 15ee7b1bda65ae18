"""Precision plugins that leave the work to stretto.Trainer: they convert nothing and clip nothing."""

from typing import Any

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from stretto.errors import UsageError
from stretto.lightning.refusals import precision_of


class StagePrecision(Precision):
    """Names a precision of Lightning, which the stages compute in."""

    def __init__(self, name: Any) -> None:
        self.precision = name

    def clip_gradients(self, *_: Any, **__: Any) -> None:
        """Do nothing: stages limit the norm of their gradients together."""


class StageDoublePrecision(DoublePrecision):
    """float64: the module and its batches are converted, as Lightning does it; the stages compute as they are."""

    def clip_gradients(self, *_: Any, **__: Any) -> None:
        """Do nothing: stages limit the norm of their gradients together."""


def plugin_for(given: Precision) -> Precision:
    """The plugin to use instead of the one that Lightning has chosen. Raises UsageError for others of the user's."""
    if isinstance(given, StagePrecision | StageDoublePrecision):
        return given
    if type(given) not in (Precision, HalfPrecision, MixedPrecision, DoublePrecision):
        raise UsageError(
            f"plugins={type(given).__name__}: its precision is not there in stages; leave it out, and choose "
            "precision='32-true', '64-true', 'bf16-true' or 'bf16-mixed'"
        )
    precision_of(str(given.precision))
    return StageDoublePrecision() if isinstance(given, DoublePrecision) else StagePrecision(given.precision)
