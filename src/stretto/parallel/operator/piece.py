"""Which part of a parameter or buffer a process holds, and how the parts make the whole again."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.parallel.operator.axis import Axis


@dataclass(frozen=True)
class Piece:
    """A tensor cut along `dim`: process r holds sizes[r] of each of `blocks` equal blocks (query, key, value)."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]
    blocks: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor, in memory of its own."""
        every = self.apart(whole)
        return self.axis.part(every, self.dim + 1, self.sizes).flatten(self.dim, self.dim + 1)

    def whole(self, own: Tensor) -> Tensor:
        """All parts together; every process has to ask."""
        return self.axis.join(self.apart(own), self.dim + 1, self.sizes).flatten(self.dim, self.dim + 1)

    def apart(self, x: Tensor) -> Tensor:
        """With the blocks as a dim of their own."""
        return x.reshape(*x.shape[: self.dim], self.blocks, -1, *x.shape[self.dim + 1 :])


def keep(layer: nn.Module, name: str, piece: Piece) -> None:
    """Let a layer hold its part only of a parameter or buffer, under the same name; a missing one stays missing."""
    whole = getattr(layer, name, None)
    if whole is None:
        return
    with torch.no_grad():
        own = piece.of(whole)
    if isinstance(whole, nn.Parameter):
        setattr(layer, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    else:
        layer.register_buffer(name, own, persistent=name not in layer._non_persistent_buffers_set)
    pieces_of(layer)[name] = piece


def pieces_of(layer: nn.Module) -> dict[str, Piece]:
    """What a layer holds parts of, by name."""
    if "stretto_pieces" not in layer.__dict__:
        layer.__dict__["stretto_pieces"] = {}
    pieces: dict[str, Piece] = layer.__dict__["stretto_pieces"]
    return pieces


def pieces(module: nn.Module) -> Iterator[tuple[str, Piece]]:
    """All that a module holds parts of, by path."""
    for path, layer in module.named_modules():
        for name, piece in layer.__dict__.get("stretto_pieces", {}).items():
            yield f"{path}.{name}" if path else name, piece
