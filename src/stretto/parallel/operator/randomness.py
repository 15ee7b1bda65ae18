"""Random numbers where processes hold different parts of a tensor.

Whole activations need the same dropout mask on every process, so the generators have to be in the same state: seed
them alike. Parts need different masks, yet the generators have to agree afterwards. So a layer that works on parts
draws from a stream of its own on each process: its seed is a number from the common generator plus the rank. Afterwards
the common generator's state is restored, and one number is drawn. Such masks are not those of one device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.nn.devices import CPU, generators
from stretto.parallel.operator.axis import Axis


class SavedStates(NamedTuple):
    """States of a device's generators: the common ones, and those that the process's own stream began with."""

    device: torch.device
    common: tuple[Tensor, ...]
    seeded: tuple[Tensor, ...]


class OwnStream:
    """Random numbers of a training layer, different on each process, from `begin` to `end`."""

    def __init__(self, axis: Axis, *, all_draw: bool = True) -> None:
        self.axis = axis
        self.all_draw = all_draw  # False: a part may be empty, so that others draw where this process draws nothing
        self.saved: SavedStates | None = None

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: save the common generators' states, and seed this process's own stream."""
        if not layer.training:
            return
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        device = CPU if device is None else device
        common = generator_states(device)
        torch.manual_seed(draw_number() + self.axis.rank)
        self.saved = SavedStates(device, common, generator_states(device))

    def end(self, *call: Any) -> None:
        """A forward hook or pre-hook: restore the common generators; without effect unless `begin` came first."""
        if self.saved is None:
            return
        (device, common, seeded), self.saved = self.saved, None
        drawn = not self.all_draw or not all(map(torch.equal, generator_states(device), seeded))
        for generator, state in zip(generators(device), common, strict=True):
            generator.set_state(state)
        if drawn:
            draw_number()


def draw_number() -> int:
    """A number from the default generator of the CPU."""
    return int(torch.randint(2**62, ()).item())


def generator_states(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the CPU's generator and, for another device, of that device's generator."""
    return tuple(generator.get_state() for generator in generators(device))


def draw_apart(layer: nn.Module, axis: Axis, until: nn.Module | None = None, *, all_draw: bool = True) -> None:
    """Let a layer draw different numbers on each process, until it has run or the layer `until` begins."""
    if not axis.draws:
        return
    stream = OwnStream(axis, all_draw=all_draw)
    layer.register_forward_pre_hook(stream.begin, with_kwargs=True)
    layer.register_forward_hook(stream.end, always_call=True)
    if until is not None:
        until.register_forward_pre_hook(stream.end)
