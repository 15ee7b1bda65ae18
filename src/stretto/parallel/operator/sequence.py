"""Hooks that let known transformer blocks work on parts of the sequence outside their cut pairs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.span import SequenceParts
from stretto.parallel.operator.transformer_blocks import CutBlock, runs

INPUTS = ("hidden_states", "src", "x", "input")


def share_parts(root: nn.Module, blocks: Sequence[CutBlock], axis: Axis) -> dict[str, SequenceParts]:
    """The SequenceParts of every block, by path, with the hooks that cut its input and gather its output.

    Blocks that follow each other share one, and pass parts on.
    """
    parts_of: dict[str, SequenceParts] = {}
    for container, together in runs(root, blocks):
        parts = SequenceParts(axis, together[0].batch_first)
        parts_of |= {block.path: parts for block in together}
        if container is not None:
            container.register_forward_pre_hook(SetRunning(parts, True))
            container.register_forward_hook(SetRunning(parts, False), always_call=True)
        for block in together:
            block.module.register_forward_pre_hook(CutInput(parts, block is together[0]), with_kwargs=True)
            block.module.register_forward_hook(GatherSequence(parts, block is together[-1]))
    return parts_of


def install(root: nn.Module, block: CutBlock, parts: SequenceParts, roles: Mapping[str, Any]) -> None:
    """Let the uncut modules of a block work on parts of the sequence."""
    for path in block.gates:
        root.get_submodule(path).register_forward_pre_hook(GatherInput(parts), with_kwargs=True)
    for path in block.norms:
        norm = root.get_submodule(path)
        norm.__class__ = with_summed_gradients(type(norm), tuple(norm._parameters))  # type: ignore[arg-type]
        norm.__dict__["boundary"] = parts
    for path, layer in block.module.named_modules(prefix=block.path):
        if isinstance(layer, nn.Dropout) and layer.p and path not in roles:
            draw_apart(layer, parts.axis, all_draw=False)


@cache  # layers of one class stay of one class
def with_summed_gradients(norm_class: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose parameters, when its forward reads them, have their gradients summed over processes.

    The parameters stay in `_parameters`: properties of these names come before nn.Module.__getattr__.
    """

    def property_of(name: str) -> property:
        def get(layer: nn.Module) -> Tensor | None:
            parameter = layer._parameters[name]
            return None if parameter is None else layer.__dict__["boundary"].used(parameter)

        return property(get)

    properties = {name: property_of(name) for name in names}
    return type(norm_class.__name__, (norm_class,), {"__module__": norm_class.__module__, **properties})


def place_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Index or keyword of the activations among a block's arguments. Raises UsageError if no known keyword is given."""
    if args:
        return 0
    name = next((keyword for keyword in INPUTS if keyword in kwargs), None)
    if name is None:
        raise UsageError(
            f"sequence=True: a block is called with the keywords {', '.join(sorted(kwargs))}; "
            f"its activations have to be the first positional argument or one of the keywords {', '.join(INPUTS)}"
        )
    return name


def with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, with its activations changed."""
    place = place_of_input(args, kwargs)
    if isinstance(place, str):
        return args, {**kwargs, place: change(kwargs[place])}
    return (change(args[0]), *args[1:]), kwargs


@dataclass(frozen=True, eq=False)
class SetRunning:
    """Marks the beginning and the end of the forward of a container of blocks."""

    parts: SequenceParts
    begins: bool

    def __call__(self, *call: Any) -> None:
        """A forward hook or pre-hook."""
        self.parts.running = self.begins


@dataclass(frozen=True, eq=False)
class CutInput:
    """Cuts the input of a block, unless the block before has passed on its part."""

    parts: SequenceParts
    first: bool

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook."""
        if self.parts.running and not self.first:
            return None
        return with_input(args, kwargs, self.parts.cut)


@dataclass(frozen=True, eq=False)
class GatherSequence:
    """Gathers the output of a block, unless the next block takes parts."""

    parts: SequenceParts
    last: bool

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook."""
        if self.parts.running and not self.last:
            return None
        if isinstance(output, tuple):
            return self.parts.whole(output[0]), *output[1:]
        return self.parts.whole(output)


@dataclass(frozen=True, eq=False)
class GatherInput:
    """Gathers the input of a module that holds several columns of a pair, once for all of them."""

    parts: SequenceParts

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook."""
        return with_input(args, kwargs, self.parts.enter)
