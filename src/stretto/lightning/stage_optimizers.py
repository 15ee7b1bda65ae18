"""The optimizers of stages: copies of the one that `configure_optimizers` returned, each of one stage's parameters.

Lightning keeps the one that was returned, the *reference*: its callbacks and schedulers see and change its groups, and
it steps nothing. Before each update a stage's optimizer takes over the options of the reference's groups (rates,
momenta), as they were when the minibatch of that update entered: so any scheduler works, stepped by Lightning.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.optim.from_function import Named
from stretto.options.checks import shown
from stretto.splitting import Stages
from stretto.trainer.host import StageOptimizers

OWN = ("params", "param_names")  # what a group does not take over


class FollowingOptimizers(StageOptimizers):
    """Makes the optimizer of each stage that a Trainer asks for, and keeps their options those of the reference.

    `prediction_rate` is the rate of modules that predict gradients, times the reference's.
    """

    def __init__(self, reference: torch.optim.Optimizer, stages: Stages, prediction_rate: float | None) -> None:
        refuse_wrapped(reference)
        super().__init__(reference, stages.model, stages.first_name_in_model)
        self._prediction_rate = prediction_rate
        self._numbers = {
            id(parameter): number
            for number, parameter in enumerate(p for group in reference.param_groups for p in group["params"])
        }
        self._options: dict[int, list[dict[str, Any]]] = {}
        self._followers: dict[int, Follower] = {}  # by the id of a stage's optimizer
        self._built: dict[int, tuple[torch.optim.Optimizer, dict[int, int]]] = {}

    def build(self, named: Named) -> torch.optim.Optimizer:
        """The optimizer of the parameters of a stage and its head, or of a module that predicts a stage's gradients.

        The parameters may be masters or copies of the modules'. A head's are in the reference's first group.
        """
        reference = self.reference
        groups: dict[int, list[nn.Parameter]] = {}
        state: dict[Any, Any] = {}
        numbers: dict[int, int] = {}
        heads = [(name, parameter) for name, parameter in named if name.startswith("heads.")]
        stage = int(named[0][0].removeprefix("heads.").partition(".")[0])
        for name, given in named:
            own = self.own(name)
            number = self.group_of(own)
            if own is not None and number is not None:
                groups.setdefault(number, []).append(given)
                numbers[id(given)] = self._numbers[id(own)]
                if own in reference.state:
                    state[given] = copy.deepcopy(reference.state[own])
        if heads:
            groups.setdefault(0, []).extend(parameter for _, parameter in heads)
        if not groups:
            raise UsageError(
                f"configure_optimizers leaves out all parameters of stage {stage}, which require gradients: freeze "
                "them with requires_grad_(False), or give them to the optimizer"
            )
        order = sorted(groups)
        built = self.made({number: groups[number] for number in order}, state)
        predicts = self._prediction_rate is not None and len(heads) == len(named)
        self._followers[id(built)] = Follower(self, built, order, self._prediction_rate if predicts else None)
        if not predicts:
            self._built.setdefault(stage, (built, numbers))
        return built

    def scheduler(self, optimizer: torch.optim.Optimizer) -> "Follower | Constant":
        """What Trainer steps after each update of a stage's optimizer."""
        return self._followers.get(id(optimizer)) or Constant()  # a copy that looks ahead: rates stay as they are

    def begin(self, minibatch: int) -> None:
        """The minibatch enters: what the reference's groups are now holds for its update."""
        self._options[minibatch] = [
            {key: value for key, value in group.items() if key not in OWN} for group in self.reference.param_groups
        ]
        done = [follower.done for follower in self._followers.values()]
        for old in [number for number in self._options if number < min(done, default=0)]:
            del self._options[old]
        for follower in self._followers.values():
            follower.apply()

    def options(self, minibatch: int) -> list[dict[str, Any]] | None:
        """The options of the reference's groups for the update of this minibatch; None if it has not entered."""
        return self._options.get(minibatch)

    def forget_state(self) -> None:
        """Free the reference's state: the stages' optimizers have theirs."""
        self.reference.state.clear()

    def numbers_of(self) -> dict[int, dict[int, int]]:
        """For each stage here, the reference's number of each of its optimizer's parameters, by their order there."""
        return {
            stage: {
                position: numbers[id(parameter)]
                for position, parameter in enumerate(p for group in built.param_groups for p in group["params"])
                if id(parameter) in numbers
            }
            for stage, (built, numbers) in self._built.items()
        }

    def whole_state(self, states: Mapping[int, Mapping[str, Any]], numbers: Mapping[int, Mapping[int, int]]) -> Any:
        """The reference's state_dict, from those of all stages' optimizers and `numbers_of` of all processes."""
        whole = self.reference.state_dict()
        whole["state"] = {
            numbers[stage][position]: values
            for stage, state in states.items()
            for position, values in state["state"].items()
            if position in numbers[stage]
        }
        whole["state"] = dict(sorted(whole["state"].items()))
        return whole


class Follower:
    """The scheduler of a stage's optimizer, whose groups are these of the reference, at `rate` times their lr."""

    def __init__(
        self, of: FollowingOptimizers, optimizer: torch.optim.Optimizer, groups: Sequence[int], rate: float | None
    ) -> None:
        self._of, self._optimizer, self._groups, self._rate = of, optimizer, groups, rate
        self.done = 0  # updates

    def step(self) -> None:
        """An update has been made: the next one has the options of the next minibatch."""
        self.done += 1
        self.apply()

    def apply(self) -> None:
        """Take over the options for the next update, if its minibatch has entered."""
        options = self._of.options(self.done)
        if options is not None:
            for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(options[number])
                if self._rate is not None:
                    group["lr"] *= self._rate

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.done = state["done"]


class Constant:
    """A scheduler that changes nothing."""

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing."""


def refuse_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer around another one: only the outer one could be cut to a stage's parameters."""
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise UsageError(
                f"configure_optimizers returned a {type(optimizer).__name__} around another optimizer, {name}="
                f"{shown(value)}: stages have optimizers of their own, so return the inner one"
            )
