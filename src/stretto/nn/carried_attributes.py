"""What forwards keep beside their graph: plain attributes and buffers, put back for a second forward.

So a counter, an LSTM's state over batches, a list that a forward appends to, and running statistics advance once a
micro-batch. Buffers that a state_dict leaves out are here, too.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, bytes, type(None))
CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)
OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module: its parameters, hooks, mode

Carried = list[tuple[nn.Module, dict[str, Any]]]
TensorCopy = tuple[Tensor, int, Tensor]  # a tensor, its version counter at the time of the copy, the copy


def own_attributes(module: nn.Module) -> dict[str, object]:
    """A module's attributes without those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}


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
        copies = ValueCopies(self._latest)
        found = [
            (module, {name: copies.of(value) for name, value in states_of(module).items()}) for module in self._modules
        ]
        self._latest = copies.tensors
        return found


class ValueCopies:
    """Copies of values whose tensors and containers are copies; what two attributes share stays shared."""

    def __init__(self, former: Mapping[int, TensorCopy] | None = None) -> None:
        self._former = former or {}
        self.tensors: dict[int, TensorCopy] = {}
        self._containers: dict[int, tuple[object, Any]] = {}

    def of(self, value: Any) -> Any:
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
    copies = ValueCopies()
    try:
        for module, values in then:
            put(vars(module), {name: copies.of(value) for name, value in values.items()})
        yield
    finally:
        for attributes, values in now:
            put(attributes, values)


def states_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in own_attributes(module).items() if is_state(value)}


def put(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Let a module have these attributes, and no others of their kinds."""
    for name in [name for name, value in attributes.items() if name not in OF_TORCH and is_state(value)]:
        if name not in values:
            del attributes[name]
    attributes.update(values)


Snapshot = list[tuple[nn.Module, str, Tensor]]
Copy = tuple[Tensor, int, Tensor]  # a buffer, its version counter at the time of the copy, the copy


class Buffers:
    """The buffers of modules: BatchNorm's statistics, spectral_norm's vectors, counters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = (owner for module in modules for owner in module.modules())
        self._owners = [owner for owner in owners if any(True for _ in owner.buffers(recurse=False))]
        self._latest: dict[int, Copy] = {}  # by the buffer's id

    def snapshot(self) -> Snapshot:
        """The buffers' current values. A buffer unchanged since the last snapshot is not copied again."""
        former, self._latest = self._latest, {}
        return [
            (owner, name, self._copy(buffer, former.get(id(buffer))))
            for owner in self._owners
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def _copy(self, buffer: Tensor, former: Copy | None) -> Tensor:
        copy = self._latest.get(id(buffer), former)  # two names of one buffer get one copy
        if copy is None or copy[0] is not buffer or copy[1] != buffer._version:
            copy = (buffer, buffer._version, buffer.detach().clone())
        self._latest[id(buffer)] = copy
        return copy[2]


@contextmanager
def exchanged(snapshot: Snapshot) -> Iterator[None]:
    """In this block modules hold the buffers of a snapshot, and update those.

    Afterwards the original tensor objects are put back, not copied into: autograd graphs that saved one stay valid.
    """
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in snapshot]
    try:
        for owner, name, value in snapshot:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


class UnsavedBuffers:
    """The buffers of modules that their state_dict leaves out, and which of them have changed since this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = {name: (buffer, buffer._version) for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._module.named_modules()
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers.get(name)) is not None
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Those that have changed, by name."""
        return {
            name: buffer
            for name, buffer in self._buffers().items()
            if name not in self._first or self._first[name][0] is not buffer or self._first[name][1] != buffer._version
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set those that a state has. Raises KeyError for a buffer that the modules do not have."""
        known = self._buffers()
        for name, value in state.items():
            if known[name].shape == value.shape:
                known[name].copy_(value)
            else:
                path, _, field = name.rpartition(".")
                self._module.get_submodule(path)._buffers[field] = value.to(known[name].device)
