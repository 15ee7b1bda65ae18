"""The lists of layers in a model, and which of them is its list of blocks."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from stretto.errors import UsageError, nearest
from stretto.nn.hooks import hooks_of
from stretto.nn.shapes import Chain
from stretto.splitting.parts import tally


def whole_list(model: object) -> bool:
    """Whether the model's forward only calls its layers one after the other."""
    if isinstance(model, nn.Sequential):
        return type(model).forward in (nn.Sequential.forward, Chain.forward)
    return isinstance(model, (nn.ModuleList, list, tuple))


def whole_tuples(model: object) -> bool:
    """Whether a layer's tuple reaches the next one as one argument: only in a plain nn.Sequential."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def opens(module: nn.Module) -> bool:
    """Whether a module is a plain nn.Sequential, without hooks, parameters or buffers of its own."""
    extras = (*module._parameters, *module._buffers, *chain.from_iterable(hooks_of(module)))
    return isinstance(module, nn.Sequential) and whole_list(module) and len(module) > 0 and not extras


def is_list(value: object) -> bool:
    """Whether a value is a list of modules."""
    return isinstance(value, (nn.ModuleList, nn.Sequential)) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, nn.Module) for entry in value)
    )


def entries(layers: Any, what: str) -> list[tuple[str, nn.Module]]:
    """(name, layer) pairs; `what` names the list in messages. Raises UsageError for an entry that is no module."""
    # named_children() would leave out a module that the list has a second time.
    pairs: Iterable[tuple[str, Any]] = (
        layers._modules.items()
        if isinstance(layers, nn.Module)
        else ((str(index), layer) for index, layer in enumerate(layers))
    )
    checked: list[tuple[str, nn.Module]] = []
    for name, layer in pairs:
        if not isinstance(layer, nn.Module):
            raise UsageError(f"entry {name} of {what} is {type(layer).__name__}: every layer must be an nn.Module")
        checked.append((name, layer))
    return checked


def lookup(model: nn.Module, path: str) -> Any:
    """The list of blocks at a dotted path. Raises UsageError, with the nearest path, if it is not there."""
    value: Any = model
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    if is_list(value):
        return value
    problem = "names nothing" if value is None else f"is {type(value).__name__}, not a list of blocks"
    raise UsageError(f"path={path!r} {problem} in {type(model).__name__}; {nearest(path, module_lists(model))}")


def module_lists(model: nn.Module) -> dict[str, Any]:
    """Every list of modules in the model by its dotted path, plain Python lists included."""
    lists: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name and is_list(module):
            lists[name] = module
        for attribute, value in vars(module).items():
            if isinstance(value, (list, tuple)) and is_list(value):
                lists[f"{name}.{attribute}" if name else attribute] = value
    return lists


def main_list(model: nn.Module) -> str | None:
    """The dotted path of the model's list of blocks; None if several lists could be it.

    It is the only list of several modules, or the one with at least three quarters of the parameters of all such lists;
    lists inside another list's modules do not count.
    """
    sizes = {path: sum(p.numel() for p in nn.ModuleList(layers).parameters()) for path, layers in outer(model).items()}
    largest = max(sizes, key=lambda path: sizes[path], default=None)
    if largest is None or (len(sizes) > 1 and 4 * sizes[largest] < 3 * sum(sizes.values())):
        return None
    return largest


def outer(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The lists of several modules that are not inside another list's modules, each list once."""
    lists = {path: list(layers) for path, layers in module_lists(model).items() if len(layers) > 1}
    inside = {
        id(module) for layers in lists.values() for entry in layers for module in entry.modules() if module is not entry
    }
    unique = {tuple(map(id, layers)): path for path, layers in reversed(lists.items()) if id(layers[0]) not in inside}
    return {path: lists[path] for path in reversed(unique.values())}


def candidates(model: object) -> str:
    """The model's lists, for a message: first those in no other list, longest first."""
    if not isinstance(model, nn.Module):
        return "give a model"
    outermost = outer(model)
    lists = sorted(module_lists(model).items(), key=lambda pair: (pair[0] not in outermost, -len(pair[1])))
    as_list = "or its layers as a list, list(model), if calling them one after the other is all it does; "
    prefix = as_list if isinstance(model, nn.Sequential) else ""
    if not lists:
        return f"{prefix}it has no list of modules: give its layers as a list"
    return prefix + "it has: " + ", ".join(f"{name!r} ({tally(layers)})" for name, layers in lists[:8])
