"""Heads that read weights which another stage trains, their owner: it sends newer ones after its updates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn


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
        """By the stage whose weights are read, those that read them."""
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
