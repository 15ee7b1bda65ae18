"""The step that is looked at: a model, a batch, a loss, and how a trainer was told to compute it.

Stages begin where they were told to, or wherever a block of the model does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.losses import Loss
from stretto.nn.batch import check_examples, cut, target_of

ROUNDING = {torch.float64: 1e-9, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
COARSE = {dtype: ROUNDING[dtype] for dtype in (torch.float16, torch.bfloat16)}
"""What is left of a gradient, relative to its length, where only the order of sums differs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStep:
    """One step of training as plain PyTorch does it, and the numbers by which a trainer may get it wrong.

    `parts` of the batch, in order: each of `replicas` has so many of its examples in a row, and cuts them into
    `accumulation` times `microbatches` parts. `earlier` are weights some updates before, by parameter. `cut` names the
    first module or parameter of each stage but the first. `activations` are outputs that the trainer had, by module.
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
    activations: Mapping[str, Tensor] = field(default_factory=dict)

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


def beginnings(step: TrainingStep) -> list[str]:
    """The first parameters of stages but the first: those that were told, else those of the model's blocks."""
    names = list(step.parameters)
    if step.cut:
        return [first_parameter(step, place) for place in step.cut]
    blocks = block_names(step.model)
    found = []
    for block in blocks:
        inside = [name for name in names if name == block or name.startswith(block + ".")]
        if inside and names.index(inside[0]):
            found.append(inside[0])
    return list(dict.fromkeys(found))


def first_parameter(step: TrainingStep, place: str) -> str:
    """The first parameter of the module, or the parameter, of this name. Raises UsageError if there is none."""
    for name in step.parameters:
        if name == place or name.startswith(place + "."):
            return name
    modules = {name.rpartition(".")[0] for name in step.parameters}
    raise UsageError(f"diagnose: cut={place!r} is no module with parameters: {nearest(place, modules)}")


def block_names(model: nn.Module) -> list[str]:
    """The outermost lists' members and, around them, the other children that hold parameters."""

    def inside(module: nn.Module, path: str) -> list[str]:
        found = []
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if not any(True for _ in child.parameters()):
                continue
            lists = isinstance(child, nn.ModuleList | nn.Sequential) or any(
                isinstance(each, nn.ModuleList | nn.Sequential) for each in child.modules()
            )
            is_block = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and path)
            found += inside(child, here) if lists and not is_block else [here]
        return found

    return inside(model, "")


def groups(step: TrainingStep) -> list[Sequence[str]]:
    """The parameters of each stage, where the cut was told."""
    names = list(step.parameters)
    places = [names.index(first) for first in beginnings(step)] if step.cut else []
    edges = [0, *places, len(names)]
    return [names[start:end] for start, end in pairwise(edges)]
