"""Whether an evaluation's loss and metrics are means over examples, by which it weighs its batches.

A mean over tokens that are not padding, a perplexity or a contrastive loss of a batch is none: what an evaluation makes
of them depends on how its examples are cut into batches.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.losses.comparison import (
    COUNT,
    DECLARED,
    DEPENDS,
    NOISE,
    LossComparison,
    combined,
    counted_line,
    in_float64,
    needs_all,
    preserved_buffers,
    rows,
)
from stretto.losses.cross_entropy import Sum
from stretto.losses.mean_check import is_trusted
from stretto.losses.value import Loss, MeanOfStage, MeanOverExamples, call
from stretto.nn.batch import Examples
from stretto.nn.input_errors import KINDS
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import PreservedGenerator

MOST = 64  # batches with a number up to this that is a power of two are looked at: early ones may have no padding
SAME = 1e-6  # a loss whose values on the same batch differ by more than this share draws random numbers
ROUNDING = 1e-5  # the share by which float32 may differ inside of a loss or metric that is given float64
OF_METRIC = (
    "Return (sum, count), as (hits.sum(), hits.numel()); or give an object with reset(), update(output, target) and "
    "compute(), which sees all batches; or, if the mean of batches is meant, say so: stretto.mean(function)"
)


class BatchMeans:
    """Looks at the loss and the metrics of a Trainer's first evaluations, and warns of each that is no mean once."""

    def __init__(self) -> None:
        self._looked_at: dict[str, int] = {}  # batches, by name
        self.warned: frozenset[str] = frozenset()  # names of what needs no warning any more

    def loss(self, loss: Loss, value: Tensor, output: Any, target: Any, examples: int) -> None:
        """Look at a loss with a `value` for a batch; warn where it is no mean over the batch's examples."""
        if is_trusted(loss) or isinstance(loss, MeanOfStage) or not self._due("loss", examples):
            return
        compared = differing(loss, float(value), output, target, examples)
        if compared is None:
            return
        sizes = halves(examples)
        depends = needs_all(loss, output, target, sizes)
        remedy = DEPENDS if depends else COUNT.format(returned=counted_line(loss, output, target))
        ending = f"{remedy}\nor, if the mean of batches is meant, {DECLARED}"
        self._warn("loss", "the loss", compared, examples, ending)

    def metric(
        self, name: str, function: Callable[[Any, Any], Any], value: float, output: Any, target: Any, examples: int
    ) -> None:
        """Look at a metric's function, which returned one number."""
        if isinstance(function, MeanOverExamples) or not self._due(f"metric {name}", examples):
            return
        compared = differing(partial(as_loss, function), value, output, target, examples)
        if compared is not None:
            self._warn(f"metric {name}", f"metric {name}", compared, examples, OF_METRIC)

    def _due(self, name: str, examples: int) -> bool:
        number = self._looked_at[name] = self._looked_at.get(name, 0) + (examples > 1)
        return examples > 1 and number <= MOST and not number & (number - 1) and name not in self.warned

    def _warn(self, name: str, subject: str, compared: LossComparison, examples: int, remedy: str) -> None:
        self.warned |= {name}
        warnings.warn(
            f"evaluation: {subject} is no mean over examples: of a batch of {examples} it is {compared.whole:.6g}, but "
            f"its values for the two halves come to {compared.parts:.6g}. An evaluation gives the mean of its values "
            f"for batches like this one: with others it is another number. {remedy}",
            stacklevel=2,
        )


def halves(examples: int) -> tuple[int, int]:
    """The numbers of examples in two halves of a batch."""
    return examples - examples // 2, examples // 2


def as_loss(function: Callable[[Any, Any], Any], output: Any, target: Any) -> Tensor:
    """A metric's number as a loss returns it. Raises TypeError where it is none."""
    value: SupportsFloat = function(output, target)
    return torch.tensor(float(value))


def differing(loss: Loss, value: float, output: Any, target: Any, examples: int) -> LossComparison | None:
    """A loss with this `value` for a batch beside what its values for the halves come to; None unless they differ.

    Also None where it draws random numbers, or fails on a half.
    """
    if isinstance(target, Examples) or not math.isfinite(value):
        return None
    device = next((tensor.device for tensor in tensors_of(output)), torch.device("cpu"))
    sizes = halves(examples)
    try:
        with ExitStack() as undisturbed:
            for context in (PreservedGenerator(device), python_generators_restored(), preserved_buffers(loss)):
                undisturbed.enter_context(context)
            undisturbed.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the evaluation's own call warns
            parts: list[Tensor | Sum] = []
            for start, size in zip((0, sizes[0]), sizes, strict=True):
                part = partial(rows, start=start, size=size, total=examples)
                parts.append(call(loss, map_tensors(part, output), map_tensors(part, target), counted=False))
            first = parts[0]
            if isinstance(first, Sum):
                return None
            compared = combined(torch.tensor(value, dtype=first.dtype), parts, sizes, NOISE)
            if compared is None or not compared.differs:
                return None
            again = call(loss, output, target, counted=False)
            if isinstance(again, Sum) or not math.isclose(value, float(again), rel_tol=SAME):
                return None
            precise = in_float64(loss, output, target, sizes)
    except (*KINDS, UsageError):  # of a half of the batch: the function of a user may ask for more
        return None
    return compared if precise is None or precise.differs_by(ROUNDING) else None
