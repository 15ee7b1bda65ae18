"""What forwards keep in plain attributes: put back for a second forward, so that it is carried on once a micro-batch.

A counter, the state of an LSTM that goes on from batch to batch, a list that a forward appends to.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.nn.preserve import OF_EVERY_MODULE, PLAIN

CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)

Carried = list[tuple[nn.Module, dict[str, Any]]]
TensorCopy = tuple[Tensor, int, Tensor]  # a tensor, its version counter at the time of the copy, the copy


def own_attributes(module: nn.Module) -> dict[str, object]:
    """A module's attributes without those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def is_container(value: object) -> bool:
    """Whether a value is a list, dict, set or deque, of no class of the user's."""
    return isinstance(value, CONTAINERS) and type(value) in CONTAINERS


def is_state(value: object) -> bool:
    """Whether a value is of a kind that a forward may carry on: a number, a tensor, or a container."""
    return isinstance(value, (*PLAIN, Tensor, tuple)) or is_container(value)


class CarriedAttributes:
    """What the modules carry. A tensor that has not changed since the last snapshot is not copied again."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._latest: dict[int, TensorCopy] = {}  # by the tensor's id

    def snapshot(self) -> Carried:
        """What they carry now, copied: tensors and containers, too."""
        copies = Copies(self._latest)
        found = [
            (module, {name: copies.of(value) for name, value in states_of(module).items()}) for module in self._modules
        ]
        self._latest = copies.tensors
        return found


class Copies:
    """Copies of values whose tensors and containers are copies; what two attributes share stays shared."""

    def __init__(self, former: Mapping[int, TensorCopy] | None = None) -> None:
        self._former = former or {}
        self.tensors: dict[int, TensorCopy] = {}
        self._containers: dict[int, tuple[object, Any]] = {}

    def of(self, value: Any) -> Any:
        """The copy of a value."""
        if isinstance(value, Tensor):
            return value if isinstance(value, nn.Parameter) or value.is_inference() else self._of_tensor(value)
        if id(value) in self._containers:
            return self._containers[id(value)][1]
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if not is_container(value):
            return value
        made = value.copy()
        self._containers[id(value)] = value, made
        if isinstance(value, dict):
            made.update((key, self.of(part)) for key, part in value.items())
        elif isinstance(value, list | deque):
            made.clear()
            made.extend(map(self.of, value))
        return made

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        copy = self.tensors.get(id(tensor)) or self._former.get(id(tensor))
        if copy is None or copy[0] is not tensor or copy[1] != tensor._version:
            copy = tensor, tensor._version, tensor.clone()  # with its graph, if it has one
        self.tensors[id(tensor)] = copy
        return copy[2]


@contextmanager
def exchanged_attributes(then: Carried) -> Iterator[None]:
    """In this block modules carry what they carried then; afterwards what they carry now."""
    now = [(vars(module), states_of(module)) for module, _ in then]
    copies = Copies()
    try:
        for module, values in then:
            put(vars(module), {name: copies.of(value) for name, value in values.items()})
        yield
    finally:
        for attributes, values in now:
            put(attributes, values)


def states_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that may be carried on."""
    return {name: value for name, value in own_attributes(module).items() if is_state(value)}


def put(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Let a module have these attributes, and no others of their kinds."""
    for name in [name for name, value in attributes.items() if name not in OF_EVERY_MODULE and is_state(value)]:
        if name not in values:
            del attributes[name]
    attributes.update(values)
