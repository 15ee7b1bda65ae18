"""What an optimizer makes of a gradient, for steps of which the weights before and after are known."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analysis.diagnosis.passes import GradientPasses, take, thinned
from stretto.analysis.diagnosis.step import TrainingStep
from stretto.errors import UsageError
from stretto.options.user_errors import called

Change = Callable[[torch.optim.Optimizer], torch.optim.Optimizer | None]
"""Changes an optimizer before its step; returns another one to be stepped after it, or None."""


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """The optimizer of a step: `make` takes parameters; `state` is its state_dict() before the step, or None."""

    step: TrainingStep
    passes: GradientPasses
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    state: Mapping[str, Any] | None = None
    changes: Mapping[str, Change] = field(default_factory=dict)

    def applied(self, gradients: Tensor, columns: Mapping[str, slice], weights: Tensor, change: str) -> Tensor:
        """The change of some elements of the weights, by their gradients; made with another optimizer's habit."""
        parameters = {
            name: nn.Parameter(weights[place].reshape(one_row(self.step.parameters[name])).clone())
            for name, place in columns.items()
        }
        optimizer = self.made(parameters)
        for name, parameter in parameters.items():
            if name not in self.passes.unused:  # what has no gradient is skipped
                parameter.grad = gradients[columns[name]].reshape(parameter.shape).to(parameter.dtype)
        again = self.changes[change](optimizer) if change else None
        optimizer.step()
        if again is not None:
            again.step()
        return torch.cat([p.detach().flatten() for p in parameters.values()]) - weights

    def made(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of some elements of the parameters, with its state."""
        optimizer = called("diagnose: optimizer", self.make, list(parameters.values()), wanted="an optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"diagnose: the optimizer's function returned {type(optimizer).__name__}: return an optimizer"
            )
        if self.state is not None:
            optimizer.load_state_dict(self._state_of(optimizer, parameters))
        return optimizer

    def _state_of(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        assert self.state is not None, "only asked for where there is one"
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = zip(optimizer.param_groups, self.state["param_groups"], strict=True)
        found: dict[Any, dict[str, Any]] = {}
        for group, saved in groups:
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                name = names[id(parameter)]
                found[key] = {
                    entry: self._elements(value, name, parameter)
                    if of_shape(value, self.step.parameters[name])
                    else value
                    for entry, value in self.state["state"].get(key, {}).items()
                }
        kept = {key: value for key, value in found.items() if value}
        return dict(self.state) | {"state": copy.deepcopy(kept)}  # a step writes into it

    def _elements(self, value: Tensor, name: str, like: nn.Parameter) -> Tensor:
        chosen = thinned(take(value, self.passes.kept[name]), like.numel())
        return chosen.reshape(like.shape).to(like.dtype)


def of_shape(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == whole.shape and value.dim() > 0


def one_row(parameter: Tensor) -> list[int]:
    """A shape of as many dimensions for some elements: groups of parameters are often chosen by that."""
    return [*[1] * (parameter.dim() - 1), -1]
