"""The optimizer that transformers makes for the whole model, and from it one for each stage."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stretto.errors import UsageError
from stretto.optim.from_function import Named
from stretto.trainer.host import StageOptimizers

MATRIX = 2  # dims from which on the weights of an auxiliary head decay


class ShownOptimizer(torch.optim.Optimizer):
    """What transformers' loop steps, and its scheduler sets rates of: the stages have made their updates already.

    `whole` is the optimizer that transformers, or the user, made. Its groups and rates are those of all stages.
    """

    def __init__(self, whole: torch.optim.Optimizer) -> None:
        super().__init__([dict(group) for group in whole.param_groups], dict(whole.defaults))
        self.whole = whole

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the step has happened."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients under way belong to the stages."""


class HuggingFaceOptimizers(StageOptimizers):
    """Makes each stage's optimizer, with all groups of the whole model's.

    A stage's optimizer of an earlier training goes on, as transformers' does, unless its parameters are others.
    """

    def __init__(self, whole: torch.optim.Optimizer, model: nn.Module, names: Callable[[str], str | None]) -> None:
        refuse_swapping(whole)
        super().__init__(whole, model, names)
        left_out = [name for name, p in model.named_parameters() if p.requires_grad and self.group_of(p) is None]
        if left_out:
            raise UsageError(
                f"the optimizer steps no parameter {left_out[0]!r}, which requires a gradient: add it to a group, or "
                "freeze it, parameter.requires_grad_(False)"
            )
        self.former: dict[frozenset[int], torch.optim.Optimizer] = {}

    def __call__(self, named: Named) -> torch.optim.Optimizer:
        key = frozenset(id(parameter) for _, parameter in named)
        if key in self.former:
            return self.former[key]
        members: dict[int, list[nn.Parameter]] = {number: [] for number in range(len(self.reference.param_groups))}
        for name, parameter in named:
            members[self._group(name, parameter)].append(parameter)
        return self.made(members, {})

    def keep(self, optimizers: list[torch.optim.Optimizer | None]) -> None:
        """Remember the optimizers of a training that has ended: those of the same parameters go on."""
        for optimizer in optimizers:
            if optimizer is not None:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                self.former[frozenset(map(id, parameters))] = optimizer

    def _group(self, name: str, parameter: nn.Parameter) -> int:
        if name.startswith("heads."):
            decays = parameter.dim() >= MATRIX
            rates = [bool(group.get("weight_decay")) for group in self.reference.param_groups]
            return rates.index(decays) if decays in rates else 0
        number = self.group_of(self.own(name))
        assert number is not None, f"{name} has no parameter in the model which the optimizer steps"
        return number


def refuse_swapping(whole: Any) -> None:
    """Raise UsageError for what is no torch optimizer, and for one with a mode of its own for evaluation."""
    if not isinstance(whole, torch.optim.Optimizer):
        raise UsageError(f"create_optimizer returned a {type(whole).__name__}, no torch.optim.Optimizer")
    if callable(getattr(whole, "eval", None)) and callable(getattr(whole, "train", None)):
        raise UsageError(
            f"{type(whole).__name__} exchanges the weights for evaluation, which the stages' passes do not know: "
            "choose another optimizer"
        )


def scheduler_like(given: Any) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """A function that makes a scheduler like the user's for each stage. Raises UsageError for any but LambdaLR."""
    if type(given) is not LambdaLR:
        raise UsageError(
            f"optimizers=(..., {type(given).__name__}): a scheduler of the whole model's optimizer cannot be made "
            "again for each stage. Set lr_scheduler_type and lr_scheduler_kwargs, override create_scheduler, or give a "
            "LambdaLR"
        )
    lambdas = list(given.lr_lambdas)
    return lambda optimizer: LambdaLR(optimizer, lambdas)
