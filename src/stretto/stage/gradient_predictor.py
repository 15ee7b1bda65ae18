"""Predicts the gradient of a stage's output, and learns from the true one: M of synthetic gradients."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stretto.errors import UsageError
from stretto.heads.gradients import rows
from stretto.nn.batch import as_tuple
from stretto.nn.seeding import ForwardSeeds
from stretto.nn.shapes import describe
from stretto.nn.state_check import check_part
from stretto.optim import Masters
from stretto.optim.loading import load

Tensors = tuple[Tensor, ...]
Gradient = tuple[Tensor | None, ...]


@dataclass(slots=True)
class KeptPrediction:
    """What is kept of a prediction until the true gradient comes.

    `outputs` are the stage's; `predicted` is what the module gave, with its graph, or None where it is computed anew
    with the module's weights of that time. `microbatch` seeds its random draws.
    """

    outputs: Tensors
    target: Any
    microbatch: int
    predicted: Gradient | None


@dataclass(kw_only=True, eq=False)
class GradientPredictor:
    """A module that predicts the gradient of a stage's output, and its optimizer.

    The optimizer steps what `masters` says of the parameters; None where nothing is trained. `keeps_graph`: no learning
    step comes between a prediction and its own, so the graph of the prediction is that of the current weights.
    """

    module: nn.Module
    seeds: ForwardSeeds
    labelled: bool
    keeps_graph: bool
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    masters: Masters = field(default_factory=Masters)

    def predict(self, outputs: Sequence[Any], target: Any, microbatch: int) -> tuple[Gradient, KeptPrediction]:
        """The predicted gradient of each of a stage's outputs, and what `learn` needs."""
        kept = KeptPrediction(tuple(tensor.detach() for tensor in outputs), target, microbatch, None)
        with torch.set_grad_enabled(self.keeps_graph):
            predicted = self._run(kept)
        if self.keeps_graph:
            kept.predicted = predicted
        gradients = tuple(
            None if value is None else value.detach().to(output.dtype) / rows(output)
            for value, output in zip(predicted, kept.outputs, strict=True)
        )
        return gradients, kept

    def learn(self, kept: KeptPrediction, arrived: Gradient, context: AbstractContextManager[object]) -> None:
        """One step on the mean squared error of the prediction; a gradient that is None counts as zero."""
        self._drop_gradients()
        with context:
            predicted = self._run(kept) if kept.predicted is None else kept.predicted
            errors = [
                squared_error(value, output, gradient)
                for value, output, gradient in zip(predicted, kept.outputs, arrived, strict=True)
                if value is not None
            ]
            loss = sum(errors[1:], errors[0])
        if loss.requires_grad:
            torch.autograd.backward(loss)
        if self.optimizer is not None:
            self.masters.step(self.optimizer.step)
            if self.scheduler is not None:
                self.scheduler.step()
        self._drop_gradients()

    def _run(self, kept: KeptPrediction) -> Gradient:
        self.seeds.start(kept.microbatch)
        run = partial(self.module, target=kept.target) if self.labelled else self.module
        predicted = as_tuple(run(*kept.outputs))
        predicted += (None,) * (len(kept.outputs) - len(predicted))
        for value, output in zip(predicted, kept.outputs, strict=False):
            if value is not None and (not isinstance(value, Tensor) or value.shape != output.shape):
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UsageError(
                    f"the head that predicts the gradient of {describe(kept.outputs)} returned {got}: return a tensor "
                    "of the shape of the stage's output, or a tuple of one (or None) for each"
                )
        if all(value is None for value in predicted):
            raise UsageError(
                f"the head that predicts the gradient of {describe(kept.outputs)} returned nothing but None"
            )
        return predicted

    def _drop_gradients(self) -> None:
        for parameter in (*self.module.parameters(), *self.masters.copies.values()):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {name: None if part is None else part.state_dict() for name, part in self._parts()}

    def check(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts():
            if (state.get(name) is None) != (part is None):
                has, had = ("no" if part is None else "a"), ("no" if state.get(name) is None else "a")
                raise ValueError(f"its {name}: {has} {name} here and {had} {name} there")
            if part is not None:
                check_part(state[name], part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts():
            if part is not None:
                load(part, state[name]) if isinstance(part, torch.optim.Optimizer) else part.load_state_dict(
                    state[name]
                )

    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("module", self.module),
            ("masters", self.masters if self.masters.copies else None),
            ("optimizer", self.optimizer),
            ("scheduler", self.scheduler),
        )


def squared_error(predicted: Tensor, output: Tensor, gradient: Tensor | None) -> Tensor:
    """The mean squared error of a prediction, in the unit of `rows`; in float32 at least."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    true = torch.zeros_like(output) if gradient is None else gradient
    return mse_loss(predicted.to(dtype), true.to(dtype) * rows(output))
