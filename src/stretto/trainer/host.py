"""What a Trainer needs inside another trainer, Lightning's or that of transformers."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stretto.methods import Method, method
from stretto.methods.table import is_advised
from stretto.optim.loading import copied
from stretto.trainer.microbatches import MinibatchCut
from stretto.trainer.trainer import Trainer


def evaluator(stages: Sequence[nn.Module], loss: Any, asked: str | Method, **options: Any) -> Trainer:
    """A Trainer that trains nothing: with 1F1B in place of a method that may want heads, or another optimizer.

    Evaluation goes through the stages alone, and what "async" and "local" stand for is not known without an optimizer.
    """
    chosen = None if is_advised(asked) else method(asked)
    chosen = chosen if chosen is not None and chosen.synchronous else method("1f1b")
    return Trainer(stages, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.0), chosen, **options)


def cut_of(trainer: Trainer) -> MinibatchCut:
    """How the trainer cuts its minibatches."""
    return MinibatchCut(trainer.method, trainer.schedule, trainer.mesh.data)


class StageOptimizers:
    """Makes each stage's optimizer from the *reference*, the optimizer of the whole `model`: its class and its options.

    `names` gives each stage's weight "<stage>.<name>" its name in the model, None for one that is not there.
    """

    def __init__(self, reference: torch.optim.Optimizer, model: nn.Module, names: Callable[[str], str | None]) -> None:
        self.reference, self._names = reference, names
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(reference.param_groups)
            for parameter in group["params"]
        }

    def own(self, name: str) -> nn.Parameter | None:
        """The model's parameter of a stage's weight; None for that of a head."""
        in_model = None if name.startswith("heads.") else self._names(name)
        return None if in_model is None else self._parameters.get(in_model)

    def group_of(self, own: nn.Parameter | None) -> int | None:
        """The number of the reference's group that steps a parameter of the model; None if none does."""
        return self._group_of.get(id(own))

    def made(self, members: Mapping[int, Sequence[nn.Parameter]], state: Mapping[Any, Any]) -> torch.optim.Optimizer:
        """A stage's optimizer: the reference's groups of these numbers, with these members."""
        groups = [{**self.reference.param_groups[n], "params": list(given)} for n, given in members.items()]
        return copied(self.reference, groups, defaultdict(dict, state))
