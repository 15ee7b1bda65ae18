"""What heads are built from (`Site`, `Network`), the base class of heads with a loss of their own, and `HeadKind`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stretto.nn.deferred import RemoteStage


class ReadingHead(nn.Module, ABC):
    """A head that holds a read-only copy of layers of another stage."""

    @property
    @abstractmethod
    def copied(self) -> nn.Module:
        """The copy, whose weights this head's loss does not train."""

    @abstractmethod
    def newer(self, weight: Tensor, arrived: Tensor) -> Tensor:
        """A new tensor in place of a `weight` of the copy, when the owner's value of it has `arrived`."""

    def receive(self, arrived: Iterable[Mapping[int, Tensor]]) -> None:
        """Take newer weights, in the order in which they were sent; a forward in flight keeps the former parameters."""
        for values in arrived:
            for number, (layer, name) in numbered(self.copied):
                if number in values:
                    weight = layer.get_parameter(name)
                    value = self.newer(weight.detach(), values[number].detach())
                    layer._parameters[name] = nn.Parameter(value, requires_grad=False)


def numbered(layers: nn.Module) -> Iterator[tuple[int, tuple[nn.Module, str]]]:
    """The (submodule, name) of each parameter with its number in messages: below 0, tied weights have the others."""
    places = [(m, name) for m in layers.modules() for name, p in m._parameters.items() if p is not None]
    return ((-1 - position, place) for position, place in enumerate(places))


@dataclass(frozen=True, eq=False)
class WeightReading:
    """Which weights heads of a kind read, and of which stage.

    `owner` takes the reading stage and the number of stages. `layers` takes the owner's module, whether it is the last
    stage, and the head's options; it returns None if there are none. `what` names these layers in messages. With
    `averages` the head has a moving average of them. `of_readout`: the model's readout is among them.
    """

    owner: Callable[[int, int], int]
    layers: Callable[..., nn.Module | None]
    what: str
    averages: bool = False
    of_readout: bool = False


@dataclass(frozen=True, eq=False)
class HeadReadings:
    """(owner stage, reading stage, every) of each stage whose head reads weights; empty if the `head` reads none."""

    head: str = ""
    kind: WeightReading | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    readers: tuple[tuple[int, int, int], ...] = ()
    num_stages: int = 0

    @cached_property
    def readers_of(self) -> dict[int, list[int]]:
        """The readers of each stage whose weights are read."""
        readers: dict[int, list[int]] = {}
        for owner, reader, _ in self.readers:
            readers.setdefault(owner, []).append(reader)
        return readers

    def lent(self, stage: int, module: nn.Module) -> dict[int, nn.Parameter]:
        """The parameters of a stage that others read, by their numbers in messages."""
        if self.kind is None or stage not in self.readers_of:
            return {}
        layers = self.kind.layers(module, stage == self.num_stages - 1, **self.options)
        if layers is None:
            return {}
        return {number: layer.get_parameter(name) for number, (layer, name) in numbered(layers)}


Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """The whole network, for heads that need it: its stages, the output of each for one batch, and that batch's inputs.

    `shared`: several processes share a stage, and each holds a part of its weights or images.
    """

    stages: Sequence[nn.Module]
    outputs: Sequence[Tensors]
    inputs: Tensors
    shared: bool = False
    _found: dict[Any, Any] = field(default_factory=dict)

    def why_unreadable(self, stage: int) -> str:
        """Why a head cannot hold a copy of layers of a stage; empty if it can."""
        if self.shared:
            return "several processes share its weights or images"
        if isinstance(self.stages[stage], RemoteStage):
            return "it was given as a function, and lives in another process: give stages as modules"
        return ""

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """What `find` finds in the whole network, for every site the same."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


@dataclass(frozen=True, eq=False)
class Site:
    """The place of a head: behind `stage`, with the stage's `features` and the model's `output` for one batch.

    `labelled`: the head predicts the features' gradient and gets the targets for it.
    """

    stage: int
    features: Tensors
    output: Tensor
    network: Network | None = None
    labelled: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the stage's first tensor, which most heads read."""
        return self.features[0].shape

    @property
    def classes(self) -> int:
        """The last dimension of the model's output: the number of classes, or of tokens in the vocabulary."""
        return self.output.shape[-1]

    @property
    def shapes(self) -> str:
        """The stage's and the model's output shapes, for messages."""
        return f"stage {self.stage} gives {list(self.shape)}, the model gives {list(self.output.shape)}"


class LocalLoss(nn.Module, ABC):
    """A head that adds a loss of its own to the task's loss. Users may subclass it."""

    @abstractmethod
    def total(self, loss: Tensor, features: Tensors, inputs: Tensors) -> Tensor:
        """The loss to train on, from the task's `loss` of this head's output, the head's `features`, and the model's
        `inputs` for the same examples. Like `loss`, a mean over the examples.
        """


@dataclass(frozen=True)
class HeadKind:
    """A kind of head: `build` makes it, and `dims` says for which outputs.

    `build` takes a `Site`, and the head's options as keywords. `dims` takes the numbers of dimensions of the stage's
    and the model's output and returns whether the kind fits; `takes` says the same in words. "auto" chooses among the
    `plain` kinds. A head of a kind with `several` reads all tensors of a stage, else the first one. One that is
    `of_network` is made from the whole network as it is cut, so that it is not known before the cut. One with `reads`
    is a `ReadingHead` with an option `every`: it gets the owner's weights after each `every` updates. One that `shares`
    has parameters of later stages, which it trains, too: those of the head behind each of some stages, from the
    network's stages, these stages' numbers, and the head's options.
    """

    dims: Callable[[int, int], bool]
    build: Callable[..., nn.Module]
    takes: str
    plain: bool = False
    several: bool = False
    of_network: bool = False
    reads: WeightReading | None = None
    shares: Callable[..., Mapping[int, Sequence[nn.Parameter]]] | None = None


class TrainedLoss(nn.Module):
    """Holds a loss that has parameters, where the last stage has its head: it is trained and saved with that stage."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *features: Any) -> Any:
        return features if len(features) > 1 else features[0]


class First(nn.Module):
    """Wraps a head behind a stage that returns several tensors: the head reads the first one."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output


REMEDY = "You can give your own: heads=[module or None for each stage], or head=path/to/file.py:function"


def decline(stage: int, num_stages: int) -> float:
    """A stage's position among the heads, from 0 at the first to 1 at the last; the last stage has no head."""
    return stage / (num_stages - 2) if num_stages > 2 else 0.0
