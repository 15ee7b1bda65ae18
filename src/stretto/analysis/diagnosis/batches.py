"""The batch of a step, from a user's function or a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto.analysis.diagnosis.names import read
from stretto.errors import UsageError
from stretto.options.checks import shown
from stretto.options.import_object import call, is_function

TARGETS = ("target", "targets", "labels", "y")
INPUTS = ("input", "inputs", "x")


def read_batch(text: str) -> tuple[Any, Any]:
    """(inputs, targets). A dict's target is its entry `targets` or `labels`. Raises UsageError for anything else."""
    if is_function(text):
        return pair(call(text, "batch", {}), text)
    return pair(read(Path(text)), text)


def pair(batch: Any, where: str) -> tuple[Any, Any]:
    """Inputs and targets of a batch, as functions and files have it."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"{where} gave {shown(batch)}: give (inputs, targets), or a dict with targets among its entries"
        )
    names = [name for name in TARGETS if name in batch]
    if not names:
        raise UsageError(
            f"{where} has {', '.join(map(str, batch))}, and no target: call one of them targets, or labels"
        )
    inputs: dict[str, Tensor] = {name: value for name, value in batch.items() if name != names[0]}
    alone = next(iter(inputs.values())) if len(inputs) == 1 and next(iter(inputs)) in INPUTS else None
    return (inputs if alone is None else alone), batch[names[0]]
