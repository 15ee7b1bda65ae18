"""A forward sees predicted weights, and its backward the same ones."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stretto.nn.parameter_hooks import with_hooks_of
from stretto.weights.stash import Stash, Version
from stretto.weights.value_rules import Rule


class Predicted(Stash):
    """`Predicted(module, rule)`: a stash of the rule's values, computed once for all forwards between two updates.

    Kosson et al. 2021 (arXiv 2003.11666), linear weight prediction with weight stashing. Where the rule returns the
    parameter itself, this is `Stash`: the version shares its storage, which is copied only if a graph still holds it.
    """

    def __init__(self, module: nn.Module, rule: Rule) -> None:
        super().__init__(module)
        self.rule = rule

    @torch.no_grad()
    def standing(self) -> Version:
        """The version with the rule's values for the current weights; all forwards until the next update share it."""
        if self._standing is None:
            values = {name: self.rule.value(name, p).data for name, p in self._parameters.items()}
            self._standing = Version(
                {name: with_hooks_of(self._parameters[name], nn.Parameter(value)) for name, value in values.items()}
            )
        return self._standing

    def forget(self) -> None:
        """Drop the version, and the rule's record of past updates."""
        super().forget()
        self.rule.forget()

    def update(self, step: Callable[[], object]) -> None:
        """As for `Stash`; calls the rule's `before` and `after` around it."""
        with torch.no_grad():
            self.rule.before(self._parameters)
        super().update(step)
        with torch.no_grad():
            self.rule.after(self._parameters)

    def held(self, versions: Iterable[Version]) -> Iterator[Tensor]:
        """As for `Stash`, and the rule's tensors."""
        yield from super().held(versions)
        yield from self.rule.held()

    def ahead(self) -> float:
        """The rule's horizon, in updates."""
        return self.rule.ahead()

    def state_dict(self) -> dict[str, Any]:
        """The rule's state, under "forward" as for `Substituted`."""
        return {"forward": self.rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the rule's state from `state_dict`."""
        self.rule.load_state_dict(state["forward"])
