"""Lists of layers: the ones a model has, and the one that is meant."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from stretto.errors import UsageError, nearest
from stretto.nn.chain import Chain
from stretto.splitting.parts import tally


def whole_list(model: object) -> bool:
    """Whether calling the layers one after the other is all the model does."""
    if isinstance(model, nn.Sequential):
        return type(model).forward in (nn.Sequential.forward, Chain.forward)
    return isinstance(model, (nn.ModuleList, list, tuple))


def whole_tuples(model: object) -> bool:
    """Whether a layer's tuple reaches the next one as one argument, as in an nn.Sequential and nowhere else."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def opens(module: nn.Module) -> bool:
    """Whether a module is nothing but the modules in it, called one after the other."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = (*module._parameters, *module._buffers, *(hook for name in hooks for hook in getattr(module, name)))
    return isinstance(module, nn.Sequential) and whole_list(module) and len(module) > 0 and not own


def is_list(value: object) -> bool:
    """Whether a value is a list of modules."""
    return isinstance(value, (nn.ModuleList, nn.Sequential)) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, nn.Module) for entry in value)
    )


def entries(layers: Any, what: str) -> list[tuple[str, nn.Module]]:
    """The layers with their names; refuses what is no module."""
    # named_children() would leave out the second of two that are the same module.
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
    """The list of blocks that a dotted name stands for. Raises UsageError, with the nearest name, if there is none."""
    found: Any = model
    for item in path.split("."):
        found = getattr(found, item, None)
    if is_list(found):
        return found
    what = "names nothing" if found is None else f"is {type(found).__name__}, not a list of blocks"
    raise UsageError(f"path={path!r} {what} in {type(model).__name__}; {nearest(path, module_lists(model))}")


def module_lists(model: nn.Module) -> dict[str, Any]:
    """Every list of modules within the model by its dotted name, plain lists included."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name and is_list(module):
            found[name] = module
        for attribute, value in vars(module).items():
            if isinstance(value, (list, tuple)) and is_list(value):
                found[f"{name}.{attribute}" if name else attribute] = value
    return found


def main_list(model: nn.Module) -> str | None:
    """The dotted name of the list that holds the model's blocks, if there is no doubt about it.

    That is the one list of several modules, or the one that holds three quarters of the parameters of all such lists;
    lists within another list's modules do not count.
    """
    sizes = {path: sum(p.numel() for p in nn.ModuleList(found).parameters()) for path, found in outer(model).items()}
    largest = max(sizes, key=lambda path: sizes[path], default=None)
    if largest is None or (len(sizes) > 1 and 4 * sizes[largest] < 3 * sum(sizes.values())):
        return None
    return largest


def outer(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The lists of several modules that are not within another one's modules, each once."""
    lists = {path: list(found) for path, found in module_lists(model).items() if len(found) > 1}
    inside = {id(m) for found in lists.values() for entry in found for m in entry.modules() if m is not entry}
    unique = {tuple(map(id, found)): path for path, found in reversed(lists.items()) if id(found[0]) not in inside}
    return {path: lists[path] for path in reversed(unique.values())}


def candidates(model: object) -> str:
    """The lists a user may mean: first those that are in no other, the longest of them first."""
    if not isinstance(model, nn.Module):
        return "give a model"
    first = outer(model)
    lists = sorted(module_lists(model).items(), key=lambda pair: (pair[0] not in first, -len(pair[1])))
    own = "or its layers as a list, list(model), if calling them one after the other is all it does; "
    prefix = own if isinstance(model, nn.Sequential) else ""
    if not lists:
        return f"{prefix}it has no list of modules: give its layers as a list"
    return prefix + "it has: " + ", ".join(f"{name!r} ({tally(layers)})" for name, layers in lists[:8])
