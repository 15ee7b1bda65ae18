"""A forward sees the weights of one rule, its backward those of another, at the time when the backward runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.nn.batch import call
from stretto.weights import check
from stretto.weights.reads import Read, Reads
from stretto.weights.value_rules import CurrentRule, Rule
from stretto.weights.weights import Weights


class Substituted(Weights):
    """`Substituted(module, forward_rule, backward_rule=None, recompute_rule=None)`.

    No backward rule means the weights as they then stand, no recompute rule that a second forward sees them as well.

    Predicted forward and current backward is Pipelined Backpropagation with linear weight prediction, two predictions
    SpecTrain, current forward and corrected backward PipeMare's T2. (For the backward to see what its forward saw,
    take `Predicted`.)

    While the module runs, its parameters hold the forward rule's values. The graph keeps no weights: where it would
    save one it gets a `Read`, and the backward gets the backward rule's value for it. So graphs in flight cost no
    copies; at most one copy lives from a forward to the next update, one from a recompute, one from a backward to
    `collect`, each only where a rule answers with other values than the parameter's. The first forward is checked as in
    `Live`.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_rule: Rule,
        backward_rule: Rule | None = None,
        recompute_rule: Rule | None = None,
    ) -> None:
        super().__init__(module)
        self.forward_rule = forward_rule
        self.backward_rule = CurrentRule() if backward_rule is None else backward_rule
        self.recompute_rule = CurrentRule() if recompute_rule is None else recompute_rule
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._leaves: list[Tensor] = list(self._parameters.values())
        self._by_pass = {"forward": self.forward_rule, "backward": self.backward_rule}
        if recompute_rule is not None:
            self._by_pass["recompute"] = recompute_rule
        self._rules = list(dict.fromkeys(self._by_pass.values()))
        self._values: dict[Rule, tuple[list[tuple[nn.Parameter, Tensor]], Reads]] = {}  # since the last update
        self._behind: dict[str, Tensor] = {}
        self._checked: set[tuple[Any, ...]] = set()

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the forward rule's values. Raises UsageError if its backward cannot have other ones."""
        assert behind == 0, f"weights {behind} updates back are asked for; only those of the rule exist"
        return self._run(self.forward_rule, inputs)

    def recompute(self, inputs: Sequence[Tensor], version: Any) -> tuple[Any, Any]:
        """Run the module on the recompute rule's values, refusing as `forward` does."""
        return self._run(self.recompute_rule, inputs)

    def _run(self, rule: Rule, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        circumstances = check.circumstances(self.module, inputs)
        if rule not in self._values:
            self._values[rule] = self._look(rule)
        others, reads = self._values[rule]
        with exchanged(others):
            if circumstances not in self._checked:
                output = check.run(self.module, inputs, reads.pack, self._unpack)
                self._checked.add(circumstances)
                return output, None
            with saved_tensors_hooks(reads.pack, self._unpack):
                return call(self.module, inputs), None

    def leaves(self, version: Any) -> list[Tensor]:
        """The trainable parameters themselves."""
        return self._leaves

    def collect(self, version: Any) -> None:
        """Gradients are already where they belong."""
        self._behind.clear()

    def forget(self) -> None:
        """Start from the parameters as they are."""
        self._values.clear()
        self._behind.clear()
        for rule in self._rules:
            rule.forget()

    def update(self, step: Callable[[], object]) -> None:
        """Tell the rules; what was computed from the weights of before is no longer right."""
        self._values.clear()
        self._behind.clear()
        with torch.no_grad():
            for rule in self._rules:
                rule.before(self._parameters)
        step()
        with torch.no_grad():
            for rule in self._rules:
                rule.after(self._parameters)

    @torch.no_grad()
    def forward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The forward rule's values."""
        rule = self.forward_rule
        others, _ = self._values[rule] if rule in self._values else self._look(rule)
        values = {id(parameter): value for parameter, value in others}
        return {name: values.get(id(p), p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def backward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The backward rule's values."""
        return {name: self._value_behind(name) for name in self._parameters}

    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """The values that are ready for the next pass, and what the rules keep."""
        yield from self._behind.values()
        for others, _ in self._values.values():
            yield from (value for _, value in others)
        for rule in self._rules:
            yield from rule.held()

    def ahead(self) -> float:
        """The forward rule's horizon."""
        return self.forward_rule.ahead()

    def state_dict(self) -> dict[str, Any]:
        """What the rules keep, for a checkpoint."""
        return {name: rule.state_dict() for name, rule in self._by_pass.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for name, rule in self._by_pass.items():
            rule.load_state_dict(state[name])

    @torch.no_grad()
    def _look(self, rule: Rule) -> tuple[list[tuple[nn.Parameter, Tensor]], Reads]:
        values = {name: like(rule.value(name, p), p) for name, p in self._parameters.items()}
        others = [(p, values[name]) for name, p in self._parameters.items() if values[name] is not p]
        return others, Reads(values)

    @torch.no_grad()
    def _unpack(self, kept: Tensor | Read) -> Tensor:
        if not isinstance(kept, Read):
            return kept
        if kept.name not in self._behind:
            self._behind[kept.name] = self._value_behind(kept.name)
        return kept.of(self._behind[kept.name])

    def _value_behind(self, name: str) -> Tensor:
        known, parameter = self._behind.get(name), self._parameters[name]
        return like(self.backward_rule.value(name, parameter), parameter).detach() if known is None else known


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """The value, with the parameter's strides: a `Read` of one is then a `Read` of the other."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)


@contextmanager
def exchanged(others: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """While it lasts, parameters hold other values. The parameters' own storage is put back, not copied."""
    own = [parameter.data for parameter, _ in others]
    try:
        for parameter, value in others:
            parameter.data = value
        yield
    finally:
        for (parameter, _), data in zip(others, own, strict=True):
            parameter.data = data
