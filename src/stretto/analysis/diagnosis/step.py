"""The step that is looked at: a model, a batch, a loss, and how a trainer was told to compute it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.nn.batch import check_examples, cut, target_of

ROUNDING = {torch.float64: 1e-9, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
COARSE = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""What is left of a gradient, relative to its length, where only the order of sums differs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of training as plain PyTorch does it, and the numbers by which a trainer may get it wrong.

    `parts` of the batch, in order: each of `replicas` has so many of its examples in a row, and cuts them into
    `accumulation` times `microbatches` parts. `earlier` are weights some updates before, by parameter. `cut` names the
    first module or parameter of each stage but the first.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Any
    loss: Loss
    microbatches: int = 1
    accumulation: int = 1
    replicas: int = 1
    tensor: int = 1
    stages: int = 1
    clip: float | None = None
    loss_scale: float | None = None
    precision: torch.dtype | None = None
    cut: Sequence[str] = ()
    earlier: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("microbatches", "accumulation", "replicas", "tensor", "stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"diagnose: {name}={value!r}: give a whole number of at least 1")
        if not self.parameters:
            raise UsageError("diagnose: the model has no parameters that require a gradient")
        examples = check_examples(self.inputs, target_of(self.target), cuts=self.num_parts > 1)
        if self.num_parts > 1 and (examples or 0) < self.num_parts:
            raise UsageError(
                f"diagnose: {examples} examples cannot be cut into {self.num_parts} parts (replicas {self.replicas} x "
                f"accumulation {self.accumulation} x microbatches {self.microbatches}): give the batch of a whole step"
            )

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name, in the order of the model; a tied one once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """The first name of each name of a parameter."""
        first = {id(p): name for name, p in self.model.named_parameters()}
        return {name: first[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}

    @property
    def num_parts(self) -> int:
        return self.replicas * self.accumulation * self.microbatches

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest dtype in which the step is computed."""
        dtypes = [p.dtype for p in self.parameters.values()]
        return max([*dtypes, self.precision or dtypes[0]], key=lambda dtype: ROUNDING.get(dtype, 0.0))

    def parts_of(self, value: Any) -> list[Any]:
        """The parts of inputs or of a target."""
        parts = []
        for of_replica in cut(value, self.replicas, "replicas"):
            for minibatch in cut(of_replica, self.accumulation, "minibatches"):
                parts += cut(minibatch, self.microbatches)
        return parts

    def factors(self) -> dict[str, float]:
        """The numbers by which a gradient is often scaled, as they are called."""
        named = {
            "microbatches": self.microbatches,
            "accumulation": self.accumulation,
            "replicas": self.replicas,
            "tensor": self.tensor,
            "stages": self.stages,
            "loss_scale": self.loss_scale or 1.0,
        }
        if self.replicas > 1:
            for name in ("microbatches", "accumulation"):
                named[f"{name} * replicas"] = getattr(self, name) * self.replicas if getattr(self, name) > 1 else 1
        several = {name: float(value) for name, value in named.items() if not math.isclose(value, 1)}
        return several | {f"1 / ({name})" if " " in name else f"1 / {name}": 1 / x for name, x in several.items()}
