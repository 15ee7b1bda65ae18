"""A rule computed on float32 master weights: the difference of two low-precision weights is mostly rounding error."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from stretto.nn.master_weights import Masters
from stretto.weights.value_rules import Parameters, Rule


class Rounded(Rule):
    """`Rounded(rule, masters)`: the values of `rule` for a parameter's master, rounded to the parameter's dtype.

    The rule gets the tensors that the optimizer steps, as it would without masters, and needs no code for them.
    """

    def __init__(self, rule: Rule, masters: Masters) -> None:
        super().__init__()
        self.rule = rule
        self._masters = masters

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """The rule's value for the master, in the parameter's dtype; the parameter if the rule returns the master."""
        master = self._masters.of(parameter)
        value = self.rule.value(name, master)
        return parameter if value is master else value.to(parameter.dtype)

    def before(self, parameters: Parameters) -> None:
        """Pass the masters to the rule's `before`."""
        self.rule.before(self._masters_of(parameters))

    def after(self, parameters: Parameters) -> None:
        """Pass the masters to the rule's `after`."""
        self.rule.after(self._masters_of(parameters))

    def ahead(self) -> float:
        """The rule's horizon, in updates."""
        return self.rule.ahead()

    def held(self) -> Iterator[Tensor]:
        """The rule's tensors."""
        return self.rule.held()

    def forget(self) -> None:
        """Drop the rule's record of past updates."""
        self.rule.forget()

    def state_dict(self) -> dict[str, Any]:
        """The rule's state, of the masters."""
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rule's state from `state_dict`."""
        self.rule.load_state_dict(state)

    def _masters_of(self, parameters: Parameters) -> Parameters:
        return {name: self._masters.of(parameter) for name, parameter in parameters.items()}
