"""Random numbers where processes hold different parts of a tensor.

Whole activations need the same dropout mask on every process, so all of them have to draw alike: seed them alike.
Parts are of different content, perhaps of different size, and must neither share a mask nor leave the generators apart.
So a layer that draws for parts does so from a stream of its own, whose seed the common generator gives; then the common
generator is put back, one number further. Such masks are not those of one device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.nn.devices import CPU, generators
from stretto.parallel.operator.axis import Axis


class Saved(NamedTuple):
    """The common generators, and what the own stream began with."""

    device: torch.device
    common: tuple[Tensor, ...]
    began: tuple[Tensor, ...]


class OwnStream:
    """A stream of its own for a layer while it trains, up to its end or the beginning of another layer in it."""

    def __init__(self, axis: Axis, *, alike: bool = True) -> None:
        self.axis = axis
        self.alike = alike  # whether all draw or none; a part may be empty
        self.saved: Saved | None = None

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: keep the common generators, seed a stream of this process's own."""
        if not layer.training:
            return
        device = next((each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        device = CPU if device is None else device
        common = states(device)
        torch.manual_seed(number() + self.axis.rank)
        self.saved = Saved(device, common, states(device))

    def end(self, *call: Any) -> None:
        """A hook of any kind; without effect where `begin` did not come first."""
        if self.saved is None:
            return
        (device, common, began), self.saved = self.saved, None
        drawn = not self.alike or not all(map(torch.equal, states(device), began))
        for generator, state in zip(generators(device), common, strict=True):
            generator.set_state(state)
        if drawn:
            number()


def number() -> int:
    """One from the common generator."""
    return int(torch.randint(2**62, ()).item())


def states(device: torch.device) -> tuple[Tensor, ...]:
    """Of the CPU's generator, and of the device's where that is another."""
    return tuple(generator.get_state() for generator in generators(device))


def draw_apart(layer: nn.Module, axis: Axis, until: nn.Module | None = None, *, alike: bool = True) -> None:
    """Let a layer draw from a stream of its own, until another one begins."""
    stream = OwnStream(axis, alike=alike)
    layer.register_forward_pre_hook(stream.begin, with_kwargs=True)
    layer.register_forward_hook(stream.end, always_call=True)
    if until is not None:
        until.register_forward_pre_hook(stream.end)
