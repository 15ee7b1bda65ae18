"""A list of layers, called one after the other."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from stretto.chain import Chain
from stretto.errors import UsageError
from stretto.splitting.cost import Inputs, attempt
from stretto.splitting.parts import Joint, Parts, tally, tied
from stretto.splitting.undisturbed import home, undisturbed
from stretto.trace import describe


class Layers(Parts):
    """Layers by name. A stage's layers keep their names, so `f"{stage}.{name}"` is a key of the trained model.

    An nn.Sequential (`whole`) hands a tuple on as one argument; in a list of layers, as between stages, the members
    of a tuple become arguments. So an nn.Sequential cannot be cut where a tuple passes.
    """

    noun = "layer"

    def __init__(
        self, layers: Sequence[tuple[str, nn.Module]], inputs: Inputs | None, *, whole: bool, together: bool
    ) -> None:
        self._layers = list(layers)
        self._whole = whole
        names = [self.name(index, index + 1) for index in range(len(self))]
        joints = {} if inputs is None else self._follow(names, inputs)
        for index in range(1, len(self)):
            if in_place(layers[index][1]):
                joints.setdefault(
                    index,
                    Joint(f"{names[index]} overwrites what {names[index - 1]} gives", "build it with inplace=False"),
                )
        shared = tied([dict(layer.named_parameters()) for _, layer in layers], names) if together else {}
        self.joints = dict(sorted({**joints, **shared}.items()))

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """Each stage an nn.Sequential of its layers."""
        kind = nn.Sequential if self._whole else Chain
        return [kind(OrderedDict(self._layers[start:stop])) for start, stop in pairwise(bounds)]

    def name(self, start: int, stop: int) -> str:
        """The layers start up to stop."""
        if stop == start + 1:
            return f"layer {start} ({type(self._layers[start][1]).__name__})"
        return f"layers {start} to {stop - 1} ({self.kinds(start, stop)})"

    def kinds(self, start: int, stop: int) -> str:
        """The layers' classes."""
        return tally(layer for _, layer in self._layers[start:stop])

    def _follow(self, names: Sequence[str], inputs: Inputs) -> dict[int, Joint]:
        # One run of the example: do the layers fit each other, and where do tuples pass?
        modules = [layer for _, layer in self._layers]
        if self._whole and len(inputs) != 1:
            raise UsageError(
                f"the example has {len(inputs)} tensors, {describe(inputs)}, but an nn.Sequential takes one: give its "
                "layers as a list (a tuple's members then become arguments), list(model), or one tensor"
            )
        joints: dict[int, Joint] = {}
        arguments: tuple[Any, ...] = inputs
        with undisturbed(modules, home(modules)), torch.no_grad():
            for index, layer in enumerate(modules):
                output = attempt(layer, names[index], arguments)
                if isinstance(output, tuple) and self._whole:
                    joints[index + 1] = Joint(
                        f"{names[index]} hands a tuple on as one argument",
                        "let the next layer take the members as arguments, and give list(model)",
                    )
                arguments = output if isinstance(output, tuple) and not self._whole else (output,)
        joints.pop(len(modules), None)
        return joints


def in_place(layer: nn.Module) -> bool:
    """Whether the layer, or the first within a Sequential, overwrites its input: what a stage is sent must stand."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))
