"""Which part of a parameter or buffer a process holds, and how the whole is gathered from the parts."""

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
        """This process's part of a whole tensor, in a new tensor."""
        return self.axis.part(self.split_blocks(whole), self.dim + 1, self.sizes).flatten(self.dim, self.dim + 1)

    def whole(self, part: Tensor) -> Tensor:
        """The whole tensor, gathered from this process's part and the others'; every process has to call it."""
        return self.axis.join(self.split_blocks(part), self.dim + 1, self.sizes).flatten(self.dim, self.dim + 1)

    def split_blocks(self, x: Tensor) -> Tensor:
        """The tensor with `dim` split in two: blocks, and channels in a block."""
        return x.reshape(*x.shape[: self.dim], self.blocks, -1, *x.shape[self.dim + 1 :])


def keep_part(layer: nn.Module, name: str, piece: Piece) -> None:
    """Replace a layer's parameter or buffer by this process's part of it; one that is None stays None."""
    whole = getattr(layer, name, None)
    if whole is None:
        return
    with torch.no_grad():
        part = piece.of(whole)
    if isinstance(whole, nn.Parameter):
        setattr(layer, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    else:
        layer.register_buffer(name, part, persistent=name not in layer._non_persistent_buffers_set)
    pieces_of(layer)[name] = piece


def pieces_of(layer: nn.Module) -> dict[str, Piece]:
    """The piece of each of a layer's own parameters and buffers that is cut, by name."""
    if "stretto_pieces" not in layer.__dict__:
        layer.__dict__["stretto_pieces"] = {}
    pieces: dict[str, Piece] = layer.__dict__["stretto_pieces"]
    return pieces


def pieces(module: nn.Module) -> Iterator[tuple[str, Piece]]:
    """The path and piece of each parameter and buffer in a module that is cut."""
    for path, layer in module.named_modules():
        for name, piece in layer.__dict__.get("stretto_pieces", {}).items():
            yield f"{path}.{name}" if path else name, piece
