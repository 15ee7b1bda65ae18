"""The tensors of nested outputs and targets: in tuples, lists, dicts, and objects with attributes."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn


def map_tensors(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """The value with every tensor replaced by `function` of it and of the tensors in its place in `others`.

    Containers are copied and stay of their kind. What is no tensor is taken from the first value.
    """
    if isinstance(value, Tensor):
        return function(value, *others)
    if isinstance(value, tuple | list):
        parts = [map_tensors(function, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, part in value.items():
            copied[key] = map_tensors(function, part, *(other[key] for other in others))
        return copied
    names = attributes(value)
    if not names:
        return value
    copied = copy.copy(value)
    for name in names:
        each = (getattr(one, name) for one in (value, *others))
        object.__setattr__(copied, name, map_tensors(function, *each))  # a frozen dataclass has no other way
    return copied


class HeldTensors(nn.Module):
    """The tensors of a value as a module's buffers, which move with it and may be replaced by others."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._container = None if isinstance(value, Tensor) else value  # modules that hold plain tensors stay alike
        for index, tensor in enumerate(tensors_of(value)):
            self.register_buffer(f"tensor_{index}", tensor)

    def value(self) -> Any:
        tensors = list(self._buffers.values())
        return tensors[0] if self._container is None else with_tensors(self._container, tensors)


def attributes(value: Any) -> list[str]:
    """The names of the attributes in which an object holds values, as dataclasses do; none of other objects."""
    if isinstance(value, type | nn.Module) or callable(value):
        return []
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return [*dict.fromkeys([*fields, *getattr(value, "__dict__", {})])]


def with_tensors(value: Any, tensors: Iterable[Any]) -> Any:
    """The value with other tensors, in the order of `tensors_of`."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), value)


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found
