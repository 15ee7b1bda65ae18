"""A rule worked out on float32 masters: the difference of two low-precision weights is mostly rounding."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from stretto.nn.master_weights import Masters
from stretto.weights.value_rules import Parameters, Rule


class Rounded(Rule):
    """`Rounded(rule, masters)`: what `rule` answers for a parameter's master, rounded to the parameter's dtype.

    The rule meets the tensors that the optimizer steps, as it would without masters, so it knows nothing of them.
    """

    def __init__(self, rule: Rule, masters: Masters) -> None:
        super().__init__()
        self.rule = rule
        self._masters = masters

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """The parameter where the rule answers with its master."""
        master = self._masters.of(parameter)
        value = self.rule.value(name, master)
        return parameter if value is master else value.to(parameter.dtype)

    def before(self, parameters: Parameters) -> None:
        """Tell the rule."""
        self.rule.before(self._mastered(parameters))

    def after(self, parameters: Parameters) -> None:
        """Tell the rule."""
        self.rule.after(self._mastered(parameters))

    def ahead(self) -> float:
        """The rule's horizon."""
        return self.rule.ahead()

    def held(self) -> Iterator[Tensor]:
        """What the rule keeps."""
        return self.rule.held()

    def forget(self) -> None:
        """Tell the rule."""
        self.rule.forget()

    def state_dict(self) -> dict[str, Any]:
        """What the rule keeps."""
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.rule.load_state_dict(state)

    def _mastered(self, parameters: Parameters) -> Parameters:
        return {name: self._masters.of(parameter) for name, parameter in parameters.items()}
