"""Hooks that let known transformer blocks work on parts of the sequence between their cut pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.span import SequenceParts
from stretto.parallel.operator.transformer_blocks import CutBlock, runs

INPUTS = ("hidden_states", "src", "x", "input")


def spans(root: nn.Module, known: Sequence[CutBlock], axis: Axis) -> dict[str, SequenceParts]:
    """The span of every block, by path; hooks on what runs several in turn."""
    span_of: dict[str, SequenceParts] = {}
    for container, together in runs(root, known):
        span = SequenceParts(axis, together[0].batch_first)
        span_of |= {block.path: span for block in together}
        if container is not None:
            container.register_forward_pre_hook(Running(span, True))
            container.register_forward_hook(Running(span, False), always_call=True)
        for block in together:
            block.module.register_forward_pre_hook(Opening(span, block is together[0]), with_kwargs=True)
            block.module.register_forward_hook(Closing(span, block is together[-1]))
    return span_of


def install(root: nn.Module, block: CutBlock, span: SequenceParts, roles: Mapping[str, Any]) -> None:
    """Let all of a block but its cut layers work on parts."""
    for path in block.gates:
        root.get_submodule(path).register_forward_pre_hook(Gate(span), with_kwargs=True)
    for path in block.norms:
        norm = root.get_submodule(path)
        norm.__class__ = summing(type(norm), tuple(norm._parameters))
        norm.__dict__["between"] = span
    for path, layer in block.module.named_modules(prefix=block.path):
        if isinstance(layer, nn.Dropout) and layer.p and path not in roles:
            draw_apart(layer, span.axis, alike=False)


def summing(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class of modules whose parameters are used on parts: as they are read, their gradients become sums.

    The parameters stay where they were; properties come before nn.Module.__getattr__.
    """

    def used(name: str) -> property:
        def get(layer: nn.Module) -> Tensor | None:
            parameter = layer._parameters[name]
            return None if parameter is None else layer.__dict__["between"].used(parameter)

        return property(get)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: used(name) for name in names}})


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Where the activations are among what a module is called with."""
    if args:
        return 0
    name = next((known for known in INPUTS if known in kwargs), None)
    if name is None:
        raise UsageError(f"sequence=True: a block is called with {sorted(kwargs)}, none of them {', '.join(INPUTS)}")
    return name


def exchanged(args: tuple[Any, ...], kwargs: dict[str, Any], how: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other activations."""
    place = given(args, kwargs)
    if isinstance(place, str):
        return args, {**kwargs, place: how(kwargs[place])}
    return (how(args[0]), *args[1:]), kwargs


@dataclass(frozen=True, eq=False)
class Running:
    """Before and behind what runs blocks in turn."""

    span: SequenceParts
    begins: bool

    def __call__(self, *call: Any) -> None:
        """A hook of any kind."""
        self.span.running = self.begins


@dataclass(frozen=True, eq=False)
class Opening:
    """Before a block: its part of the whole, unless the block before has given that."""

    span: SequenceParts
    first: bool

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook."""
        if self.span.running and not self.first:
            return None
        return exchanged(args, kwargs, self.span.cut)


@dataclass(frozen=True, eq=False)
class Closing:
    """Behind a block: the whole, unless the next block takes parts."""

    span: SequenceParts
    last: bool

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook."""
        if self.span.running and not self.last:
            return None
        if isinstance(output, tuple):
            return self.span.whole(output[0]), *output[1:]
        return self.span.whole(output)


@dataclass(frozen=True, eq=False)
class Gate:
    """Before a module that holds several columns of a pair: the whole, once for all."""

    span: SequenceParts

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook."""
        return exchanged(args, kwargs, self.span.enter)
