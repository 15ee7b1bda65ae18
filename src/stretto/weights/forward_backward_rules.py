"""A backward sees other weights than its forward: those current when it runs (`Live`), or a rule's (`Substituted`).

Nothing is copied in `Live`; in `Substituted` a graph saves weights by name instead of by value (`Reads`), so that a
backward gets the values of its rule, computed when it runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.errors import UsageError
from stretto.nn.batch import call
from stretto.weights import saved_tensor_check
from stretto.weights.saved_tensor_check import STASH
from stretto.weights.value_rules import CurrentRule, Rule
from stretto.weights.weights import Current, Weights, unwritten


class Read(NamedTuple):
    """Stands in a graph for a weight, or a view of one, that the backward will read: its name, size and strides."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the weight's first one

    def of(self, weight: Tensor) -> Tensor:
        """The same view of another tensor of the weight's size and strides."""
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


class Reads:
    """Recognises weights and their views among the tensors that a graph saves, by storage: they have no `_base`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._ranges: dict[int, list[tuple[int, int, str]]] = {}  # by storage address: first element, end, weight
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        for name, weight in weights.items():
            if weight.numel():
                start, end = storage_range(weight)
                self._ranges.setdefault(weight.untyped_storage().data_ptr(), []).append((start, end, name))
        for ranges in self._ranges.values():
            ranges.sort()
            for (_, end, first), (start, _, second) in pairwise(ranges):
                if start < end:
                    raise UsageError(
                        f"weights {first!r} and {second!r} overlap in memory: give each a tensor of its own"
                    )

    def pack(self, tensor: Tensor) -> Any:
        """A `Read` for a weight or a view of one, any other tensor itself: a pack function of `saved_tensors_hooks`.

        Raises UsageError for a tensor in a weight's storage that is not a view of one weight in its dtype.
        """
        if self._ranges and tensor.layout == torch.strided:
            ranges = self._ranges.get(tensor.untyped_storage().data_ptr())
            if ranges is not None:
                return self._find(tensor, ranges)
        return tensor

    def _find(self, tensor: Tensor, ranges: list[tuple[int, int, str]]) -> Read:
        start, end = storage_range(tensor)
        for weight_start, weight_end, name in ranges:
            same_type = tensor.dtype == self._dtypes[name] and not tensor.is_conj()
            if weight_start <= start and end <= weight_end and same_type:
                return Read(name, tuple(tensor.shape), tensor.stride(), start - weight_start)
        names = ", ".join(repr(name) for _, _, name in ranges)
        raise UsageError(
            f"a backward reads {names} in another shape or dtype, whose values cannot be replaced; {STASH}"
        )


def storage_range(tensor: Tensor) -> tuple[int, int]:
    """The elements [start, end) of its storage that a tensor spans."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(
        int((size - 1) * step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


class Live(Current):
    """Pipelined Backpropagation (Kosson et al. 2021, arXiv 2003.11666) and PACI: one version of the weights.

    `Live(module)`. The module is called as it is, its graph holds the parameters, and the optimizer changes them in
    place without autograd noticing. The first forward, and the first one after a change of mode, dtype or autocast, is
    checked: `forward` raises UsageError for a module whose backward would read a copy of a weight (`checked_call`).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._checked: set[tuple[Any, ...]] = set()
        self._by_name = not saved_tensor_check.can_hide_changes()

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """The module's output, and None. Raises UsageError if its backward would not see the current weights."""
        assert behind == 0, f"weights {behind} updates back are asked for; only the current ones exist"
        conditions = saved_tensor_check.forward_conditions(self.module, inputs)
        pack = Reads(self._named).pack if self._by_name else None
        if conditions not in self._checked:
            output = saved_tensor_check.checked_call(self.module, inputs, pack, self._unpack)
            self._checked.add(conditions)
            return output, None
        # A hook set around the stage; `checked_call` has seen hooks set inside it.
        if pack is None and saved_tensor_check.innermost_hook() is not None:
            saved_tensor_check.refuse("", self.module, *saved_tensor_check.HOOKED)
        with saved_tensors_hooks(pack, self._unpack) if pack is not None else nullcontext():
            return call(self.module, inputs), None

    def update(self, step: Callable[[], object]) -> None:
        """Change the weights that graphs in flight hold. Raises UsageError if `step` gives a parameter new storage."""
        addresses = [parameter.data_ptr() for parameter in self._leaves]
        with nullcontext() if self._by_name else saved_tensor_check.unnoticed(self._leaves):
            step()
        if addresses != [parameter.data_ptr() for parameter in self._leaves]:
            raise UsageError(f"the optimizer gave a parameter new storage; change it in place, or {STASH}")

    def _unpack(self, saved: Tensor | Read) -> Tensor:
        return saved.of(self._named[saved.name].detach()) if isinstance(saved, Read) else saved


class Substituted(Weights):
    """`Substituted(module, forward_rule, backward_rule=None, recompute_rule=None)`.

    Without a backward rule the backward reads the weights current when it runs; without a recompute rule so does a
    recompute.

    A predicted forward with a current backward is Pipelined Backpropagation with linear weight prediction; two
    predictions are SpecTrain; a current forward with a corrected backward is PipeMare's T2. (For a backward that sees
    the values of its forward, take `Predicted`.)

    While the module runs, its parameters hold the forward rule's values. The graph saves no weights: it saves a `Read`
    in place of each, and the backward gets the backward rule's value for it. So graphs in flight cost no copies. At
    most three copies of the weights exist: one from a forward to the next update, one from a recompute, and one from a
    backward to `collect`, each only where a rule returns other values than the parameter's. The first forward is
    checked as in `Live`.
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
        self._values: dict[Rule, tuple[list[tuple[nn.Parameter, Tensor]], Reads]] = {}  # until the next update
        self._backward_values: dict[str, Tensor] = {}  # until `collect`
        self._checked: set[tuple[Any, ...]] = set()

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the forward rule's values. Raises UsageError if its backward cannot read other values."""
        assert behind == 0, f"weights {behind} updates back are asked for; only those of the rule exist"
        return self._run(self.forward_rule, inputs)

    def recompute(self, inputs: Sequence[Tensor], version: Any) -> tuple[Any, Any]:
        """Run the module on the recompute rule's values. Raises UsageError as `forward` does."""
        return self._run(self.recompute_rule, inputs)

    def _run(self, rule: Rule, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        conditions = saved_tensor_check.forward_conditions(self.module, inputs)
        if rule not in self._values:
            self._values[rule] = self._evaluate(rule)
        replacements, reads = self._values[rule]
        with replaced_data(replacements), unwritten(self._parameters):
            if conditions not in self._checked:
                output = saved_tensor_check.checked_call(self.module, inputs, reads.pack, self._unpack)
                self._checked.add(conditions)
                return output, None
            with saved_tensors_hooks(reads.pack, self._unpack):
                return call(self.module, inputs), None

    def leaves(self, version: Any) -> list[Tensor]:
        """The trainable parameters themselves."""
        return self._leaves

    def collect(self, version: Any) -> None:
        """Drop the backward's values; the backward has filled the parameters' own `.grad`."""
        self._backward_values.clear()

    def forget(self) -> None:
        """Drop all values, and the rules' record of past updates."""
        self._values.clear()
        self._backward_values.clear()
        for rule in self._rules:
            rule.forget()

    def update(self, step: Callable[[], object]) -> None:
        """Drop the values of the old weights; call each rule's `before` and `after` around `step`."""
        self._values.clear()
        self._backward_values.clear()
        with torch.no_grad():
            for rule in self._rules:
                rule.before(self._parameters)
        step()
        with torch.no_grad():
            for rule in self._rules:
                rule.after(self._parameters)

    @torch.no_grad()
    def forward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The forward rule's values, by the parameter's name."""
        rule = self.forward_rule
        replacements, _ = self._values[rule] if rule in self._values else self._evaluate(rule)
        values = {id(parameter): value for parameter, value in replacements}
        return {name: values.get(id(p), p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def backward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The backward rule's values, by the parameter's name."""
        return {name: self._backward_value(name) for name in self._parameters}

    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """The rules' values computed since the last update, and the rules' own tensors."""
        yield from self._backward_values.values()
        for replacements, _ in self._values.values():
            yield from (value for _, value in replacements)
        for rule in self._rules:
            yield from rule.held()

    def ahead(self) -> float:
        """The forward rule's horizon, in updates."""
        return self.forward_rule.ahead()

    def state_dict(self) -> dict[str, Any]:
        """Each rule's state, by its pass: forward, backward, recompute."""
        return {name: rule.state_dict() for name, rule in self._by_pass.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load each rule's state from `state_dict`."""
        for name, rule in self._by_pass.items():
            rule.load_state_dict(state[name])

    @torch.no_grad()
    def _evaluate(self, rule: Rule) -> tuple[list[tuple[nn.Parameter, Tensor]], Reads]:
        values = {name: like(rule.value(name, p), p) for name, p in self._parameters.items()}
        replacements = [(p, values[name]) for name, p in self._parameters.items() if values[name] is not p]
        return replacements, Reads(values)

    @torch.no_grad()
    def _unpack(self, saved: Tensor | Read) -> Tensor:
        if not isinstance(saved, Read):
            return saved
        if saved.name not in self._backward_values:
            self._backward_values[saved.name] = self._backward_value(saved.name)
        return saved.of(self._backward_values[saved.name])

    def _backward_value(self, name: str) -> Tensor:
        cached, parameter = self._backward_values.get(name), self._parameters[name]
        return like(self.backward_rule.value(name, parameter), parameter).detach() if cached is None else cached


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """The value with the parameter's strides, so that a `Read` of the parameter also describes a view of the value."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)


@contextmanager
def replaced_data(replacements: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Inside this context each parameter holds its replacement; afterwards it has its own storage again, uncopied."""
    originals = [parameter.data for parameter, _ in replacements]
    try:
        for parameter, value in replacements:
            parameter.data = value
        yield
    finally:
        for (parameter, _), data in zip(replacements, originals, strict=True):
            parameter.data = data
