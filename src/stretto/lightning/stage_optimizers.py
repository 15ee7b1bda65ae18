"""The optimizers of stages: copies of the one that `configure_optimizers` returned, each of one stage's parameters.

Lightning keeps the one that was returned, the *reference*: its callbacks and schedulers see and change its groups, and
it steps nothing. Before each update a stage's optimizer takes over the options of the reference's groups (rates,
momenta), as they were when the minibatch of that update entered: so any scheduler works, stepped by Lightning.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.optim.copied_optimizer import copied
from stretto.options.checks import shown

OWN = ("params", "param_names")  # what a group does not take over


class StageOptimizers:
    """Makes the optimizer of each stage that a Trainer asks for, and keeps their options those of the reference.

    `stages` are the modules of all stages, `copies` the number of replicas in this process, `here` this process's
    stages, `heads` the stages that have a head.
    """

    def __init__(
        self,
        reference: torch.optim.Optimizer,
        stages: Sequence[nn.Module],
        *,
        here: Sequence[int],
        copies: int,
        heads: Sequence[int],
    ) -> None:
        refuse_wrapped(reference)
        self.reference = reference
        self._expected = self._calls(stages, here, copies, heads)
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(reference.param_groups)
            for parameter in group["params"]
        }
        self._numbers = {
            id(parameter): number
            for number, parameter in enumerate(p for group in reference.param_groups for p in group["params"])
        }
        self._options: dict[int, list[dict[str, Any]]] = {}
        self._followers: dict[int, Follower] = {}  # by the id of a stage's optimizer
        self._built: dict[int, tuple[torch.optim.Optimizer, dict[int, int]]] = {}

    @staticmethod
    def _calls(
        stages: Sequence[nn.Module], here: Sequence[int], copies: int, heads: Sequence[int]
    ) -> Iterator[tuple[int, list[nn.Parameter]]]:
        # The stage of each optimizer in the order that a Trainer asks for them, with the module's own parameters.
        seen: set[int] = set()
        for index, stage in enumerate(stages):
            own = [p for p in stage.parameters() if p.requires_grad and id(p) not in seen]
            seen |= {id(parameter) for parameter in stage.parameters()}
            if index in here and (own or index in heads):
                for _ in range(copies):
                    yield index, own

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the next stage. `parameters`: the module's (or their masters, or copies), then the head's.

        A head's are in the reference's first group.
        """
        stage, own = next(self._expected)
        assert len(parameters) >= len(own), f"stage {stage}: {len(parameters)} parameters for {len(own)}"
        reference = self.reference
        groups: dict[int, list[nn.Parameter]] = {}
        state: dict[Any, Any] = defaultdict(dict)
        numbers: dict[int, int] = {}
        for given, parameter in zip(parameters, own, strict=False):
            number = self._group_of.get(id(parameter))
            if number is not None:
                groups.setdefault(number, []).append(given)
                numbers[id(given)] = self._numbers[id(parameter)]
                if parameter in reference.state:
                    state[given] = copy.deepcopy(reference.state[parameter])
        if len(parameters) > len(own):
            groups.setdefault(0, []).extend(parameters[len(own) :])
        if not groups:
            raise UsageError(
                f"configure_optimizers leaves out all parameters of stage {stage}, which require gradients: freeze "
                "them with requires_grad_(False), or give them to the optimizer"
            )
        order = sorted(groups)
        built = copied(reference, [{**reference.param_groups[n], "params": groups[n]} for n in order], state)
        self._followers[id(built)] = Follower(self, built, order)
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
    """The scheduler of a stage's optimizer, whose groups are the reference's groups `groups`."""

    def __init__(self, of: StageOptimizers, optimizer: torch.optim.Optimizer, groups: Sequence[int]) -> None:
        self._of, self._optimizer, self._groups = of, optimizer, groups
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

    def state_dict(self) -> dict[str, int]:
        """The number of updates."""
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many updates."""
        self.done = state["done"]


class Constant:
    """A scheduler that changes nothing."""

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, int]:
        """Nothing."""
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
