"""Models that are a list of layers, called one after the other."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from stretto.errors import UsageError, nearest
from stretto.nn.chain import Chain
from stretto.nn.hooks import hooks_of
from stretto.nn.preserve import device_of, undisturbed
from stretto.nn.shapes import describe
from stretto.splitting.cost import Inputs, attempt
from stretto.splitting.parts import Joint, SplitParts, tally, tied
from stretto.splitting.proof import Original, Proof


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


class NamedLayer(NamedTuple):
    """A layer, its name in each nn.Sequential around it, and those nn.Sequentials, without the outermost list."""

    path: tuple[str, ...]
    module: nn.Module
    sequences: tuple[nn.Module, ...]


class Layers(SplitParts):
    """Layers by name. A stage's layers keep their names, so `f"{stage}.{name}"` is a key of the trained model.

    They are those of `sequence`, if one was given. An nn.Sequential (`whole`) passes a tuple on as one argument; in a
    list of layers, as between stages, the members of a tuple become arguments. So an nn.Sequential cannot be cut where
    a layer returns a tuple. With `opened`, a plain nn.Sequential among the layers can be cut between its own layers.
    """

    noun = "layer"

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        inputs: Inputs | None,
        *,
        sequence: nn.Sequential | None,
        whole: bool,
        together: bool,
        opened: bool = False,
    ) -> None:
        self._given, self._sequence, self._opened = layers, sequence, opened
        whole_layers = [NamedLayer((name,), layer, ()) for name, layer in layers]
        self._layers = [inner for layer in whole_layers for inner in leaf_layers(layer)] if opened else whole_layers
        self._whole = whole
        names = [self.name(index, index + 1) for index in range(len(self))]
        joints = {} if inputs is None else self._run_example(names, inputs)
        for index in range(1, len(self)):
            if in_place(self._layers[index].module):
                joints.setdefault(
                    index,
                    Joint(f"{names[index]} overwrites what {names[index - 1]} gives", "build it with inplace=False"),
                )
        owned = [dict(layer.module.named_parameters()) for layer in self._layers]
        self.joints = dict(sorted({**joints, **(tied(owned, names) if together else {})}.items()))

    def __len__(self) -> int:
        return len(self._layers)

    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """Each stage as an nn.Sequential of its layers; as a Chain if the model is a list."""
        kind = nn.Sequential if self._whole else Chain
        return [kind(nested(self._layers[start:stop])) for start, stop in pairwise(bounds)]

    def name(self, start: int, stop: int) -> str:
        """The layers from `start` up to `stop`, for messages."""
        if stop == start + 1:
            return f"layer {start} ({type(self._layers[start].module).__name__})"
        return f"layers {start} to {stop - 1} ({self.kinds(start, stop)})"

    def kinds(self, start: int, stop: int) -> str:
        """The classes of the layers from `start` up to `stop`, and how many of each."""
        return tally(layer.module for layer in self._layers[start:stop])

    @property
    def original(self) -> Original:
        """The nn.Sequential, or the list of layers called one after the other."""
        modules = [layer for _, layer in self._given]
        if self._sequence is None:
            return Original(Chain(*modules), modules, "the list of layers")
        return Original(self._sequence, [self._sequence], type(self._sequence).__name__)

    def why_different(self) -> str:
        """A container that does more than to call its layers."""
        return "Give split a list of layers, list(model), which are called one after the other and nothing else"

    def verify(self, stages: Sequence[nn.Module], inputs: Inputs | None) -> Proof:
        """Nothing is to be proved of the layers of a list that are stages as they are."""
        if self._sequence is None and not self._opened:
            return Proof("proved: the stages are the layers of the list, and nothing else was there")
        return super().verify(stages, inputs)

    def divisible(self, index: int) -> bool:
        """Whether a layer has submodules."""
        return any(True for _ in self._layers[index].module.children())

    def _run_example(self, names: Sequence[str], inputs: Inputs) -> dict[int, Joint]:
        # Run the example once: checks that the layers fit each other, and finds those that return tuples.
        modules = [layer.module for layer in self._layers]
        if self._whole and len(inputs) != 1:
            raise UsageError(
                f"the example has {len(inputs)} tensors, {describe(inputs)}, but an nn.Sequential takes one: give its "
                "layers as a list (a tuple's members then become arguments), list(model), or one tensor"
            )
        joints: dict[int, Joint] = {}
        arguments: tuple[Any, ...] = inputs
        with undisturbed(modules, device_of(modules)), torch.no_grad():
            for index, layer in enumerate(modules):
                output = attempt(layer, names[index], arguments)
                unpacked = isinstance(output, tuple) and not self._passes_whole(index)
                if isinstance(output, tuple) and not unpacked:
                    joints[index + 1] = Joint(
                        f"{names[index]} hands a tuple on as one argument",
                        "let the next layer take the members as arguments, and give list(model)",
                    )
                arguments = output if unpacked else (output,)
        joints.pop(len(modules), None)
        return joints

    def _passes_whole(self, index: int) -> bool:
        # Whether a layer's tuple reaches the next one as one argument: the innermost sequence around both decides.
        next_sequences = self._layers[index + 1].sequences if index + 1 < len(self) else ()
        common = [
            one for one, other in zip(self._layers[index].sequences, next_sequences, strict=False) if one is other
        ]
        return whole_tuples(common[-1]) if common else self._whole


def leaf_layers(layer: NamedLayer) -> Iterator[NamedLayer]:
    """The layers of a plain nn.Sequential, nested ones opened too; any other layer as it is."""
    if not opens(layer.module):
        yield layer
        return
    for name, module in layer.module._modules.items():
        assert module is not None, "an nn.Sequential with None in it could not be called"
        yield from leaf_layers(NamedLayer((*layer.path, name), module, (*layer.sequences, layer.module)))


def nested(layers: Sequence[NamedLayer], depth: int = 0) -> OrderedDict[str, nn.Module]:
    """The layers by name, inside the nn.Sequentials that they come from.

    An nn.Sequential whose layers are all here is used itself; of any other, a new one holds the layers that are here.
    """
    by_name: OrderedDict[str, nn.Module] = OrderedDict()
    for name, group in groupby(layers, key=lambda layer: layer.path[depth]):
        members = list(group)
        if len(members[0].path) == depth + 1:
            by_name[name] = members[0].module
            continue
        sequence = members[0].sequences[depth]
        if len(members) == len(list(leaf_layers(NamedLayer(("",), sequence, ())))):
            by_name[name] = sequence
        else:
            kind = nn.Sequential if whole_tuples(sequence) else Chain
            by_name[name] = kind(nested(members, depth + 1))
            by_name[name].training = sequence.training
    return by_name


def in_place(layer: nn.Module) -> bool:
    """Whether the layer (of an nn.Sequential, its first) overwrites its input, which a stage must not do."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))
