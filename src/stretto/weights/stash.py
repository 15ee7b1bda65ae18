"""A backward sees the weights its forward saw: weight stashing (PipeDream, Narayanan et al. 2019, section 3.3).

Two versions alone are PipeDream-2BW; versions may hold predicted weights. An update leaves the former weights where
they are, without copying them beforehand.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.nn.batch import Named
from stretto.nn.hooks import with_hooks_of
from stretto.weights import saved_tensor_check
from stretto.weights.value_rules import Rule
from stretto.weights.weights import Weights, unwritten

# Their steps change parameters themselves, never a view of their memory.
OPTIMIZERS = (SGD, Adam, AdamW)
LARGE = 1 << 17  # bytes of a parameter; a smaller one is copied faster than the step's operations are looked at

aten = torch.ops.aten
OUT_OF_PLACE: Mapping[Any, Any] = {
    aten.add_.Tensor: aten.add.out,
    aten.mul_.Tensor: aten.mul.out,
    aten.addcdiv_.default: aten.addcdiv.out,
}


def step_elsewhere(parameters: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
    """Call `step`, whose changes of the parameters do not reach tensors that share their storage now.

    A copy before the step would read and write each weight once more. Where the step is that of a known optimizer, the
    first operation that changes a parameter writes to fresh storage instead, with the same numbers to the last bit.
    Otherwise the parameters are copied.
    """
    known = is_known(step)
    large: list[nn.Parameter] = []
    for parameter in parameters:
        if known and parameter.nbytes >= LARGE and not parameter.is_complex():  # those are changed by a view
            large.append(parameter)
        else:
            move(parameter)
    with WritesElsewhere(large) if large else nullcontext():
        step()


def is_known(step: Callable[[], object]) -> bool:
    """Whether `step` is the own step of one of OPTIMIZERS, without a user's code in front of it."""
    optimizer: Any = getattr(step, "__self__", None)
    if type(optimizer) not in OPTIMIZERS:
        return False
    own = getattr(step, "__func__", None) is type(optimizer).step or hasattr(step, "_wrapped_by_lr_sched")
    return own and not (optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)


def move(parameter: Tensor) -> None:
    """Give the parameter a copy of its values as its storage."""
    parameter.data = parameter.data.clone()


def is_dense(argument: object) -> bool:
    return not isinstance(argument, Tensor) or argument.layout == torch.strided


class WritesElsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first operation that changes one of `parameters` gives it fresh storage with the result."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waiting = {id(parameter): parameter for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each operation below autograd; for all but those first ones, it is run as it is."""
        kwargs = kwargs or {}
        if not (self._waiting and func._schema.is_mutable):
            return func(*args, **kwargs)
        first = self._waiting.get(id(args[0])) if args else None
        if first is not None and func in OUT_OF_PLACE and all(map(is_dense, args)):
            del self._waiting[id(first)]
            fresh = torch.empty_like(first)
            OUT_OF_PLACE[func](*args, **kwargs, out=fresh)
            first.data = fresh
            return first
        for argument in args:  # of a fused step, or one on lists of tensors
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                parameter = self._waiting.pop(id(tensor), None)
                if parameter is not None:
                    move(parameter)
        return func(*args, **kwargs)


@dataclass(slots=True)
class Version:
    """Leaves that share storage with the parameters until the next update, and how many graphs hold them.

    A forward that will be recomputed counts as a graph.
    """

    leaves: dict[str, nn.Parameter]
    graphs: int = 0


class Stash(Weights):
    """Weights are kept at an update only while a graph still holds them.

    A forward runs on leaves of its own (`functional_call`), so a graph never saves the parameters the optimizer
    changes. In an update the parameters move to fresh storage and the leaves keep the old one. Re-binding
    `p.data` alone would be silently wrong for convolutions and norms: their backward reads the parameter again.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._standing: Version | None = None
        self._checked = False  # a checkpoint in the module would recompute on the parameters, not on the leaves

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the leaves of the current version."""
        assert behind == 0, f"weights {behind} updates back are asked for; a stash keeps those of forwards only"
        return self.run_on(self.standing(), inputs)

    def standing(self) -> Version:
        """The version with the current weights; all forwards until the next update share it."""
        if self._standing is None:
            self._standing = Version(
                {name: with_hooks_of(p, nn.Parameter(p.data)) for name, p in self._parameters.items()}
            )
        return self._standing

    def run_on(self, version: Version, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """Run the module on a version's leaves; the graph holds the version until `collect`.

        The first call raises UsageError for a module that recomputes in its backward.
        """
        version.graphs += 1
        if self._checked:
            return self._call(version, inputs), version
        output = saved_tensor_check.call_refusing_checkpoints(self.module, lambda: self._call(version, inputs))
        self._checked = True
        return output, version

    def recompute(self, inputs: Sequence[Tensor], version: Version) -> tuple[Any, Any]:
        """Run the module again on the leaves that its forward saw."""
        return self._call(version, inputs), version

    def _call(self, version: Version, inputs: Sequence[Tensor]) -> Any:
        with unwritten(version.leaves):
            if isinstance(inputs, Named):
                given = dict(zip(inputs.names, inputs, strict=True))
                return functional_call(self.module, dict(version.leaves), (), given)
            return functional_call(self.module, dict(version.leaves), tuple(inputs))

    def leaves(self, version: Version) -> list[Tensor]:
        """The version's leaves."""
        return list(version.leaves.values())

    def collect(self, version: Version) -> None:
        """Move the leaves' gradients to the parameters; forget a version that no graph holds."""
        version.graphs -= 1
        for name, leaf in version.leaves.items():
            parameter = self._parameters[name]
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)
                leaf.grad = None
        if version.graphs == 0 and version is self._standing:
            self._standing = None

    def forget(self) -> None:
        """Drop the current version: the next forward reads the parameters."""
        self._standing = None

    def update(self, step: Callable[[], object]) -> None:
        """Leave the storage to the graphs that hold it, if any, and let `step` write the new weights elsewhere."""
        standing, self._standing = self._standing, None
        if standing is None:
            step()
            return
        shared = [
            parameter
            for name, parameter in self._parameters.items()
            if standing.leaves[name].data_ptr() == parameter.data_ptr()
        ]
        step_elsewhere(shared, step)

    def forward_values(self, version: Version) -> Mapping[str, Tensor]:
        """The version's leaves, by the parameter's name."""
        return version.leaves

    def backward_values(self, version: Version) -> Mapping[str, Tensor]:
        """The version's leaves, by the parameter's name."""
        return version.leaves

    def held(self, versions: Iterable[Version]) -> Iterator[Tensor]:
        """The leaves of these versions and of the current one."""
        for version in (*versions, self._standing):
            if version is not None:
                yield from version.leaves.values()


class DoubleBuffered(Stash):
    """The current weights and those before the last update (Narayanan et al. 2021, arXiv 2006.09503, section 3.1).

    A forward may read the weights before the last update, but none older. The schedule must guarantee this: an update
    takes at least as many micro-batches as there are stages. The first minibatch after a drain reads the current
    weights (`schedule.Delays`).
    """

    _former: Version | None = None

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the current version (`behind` 0), or on the one before the last update (1)."""
        if behind == 0:
            return super().forward(inputs)
        assert behind == 1, f"weights {behind} updates back are asked for; two versions are kept"
        assert self._former is not None, "no update has happened yet"
        return self.run_on(self._former, inputs)

    def forget(self) -> None:
        """Drop both versions: the next forward reads the parameters."""
        super().forget()
        self._former = None

    def update(self, step: Callable[[], object]) -> None:
        """The current version becomes the former one and keeps its storage; the parameters get a copy to change."""
        self._former = self.standing()
        super().update(step)

    def held(self, versions: Iterable[Version]) -> Iterator[Tensor]:
        """As for `Stash`, and the leaves of the former version, whether or not a graph holds it."""
        yield from super().held([*versions, *([] if self._former is None else [self._former])])


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
