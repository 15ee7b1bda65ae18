"""Which part of a parameter or buffer a process holds, how the whole is gathered, and the norms of cut gradients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

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


Norms = Callable[[Sequence[Tensor]], Tensor]


def norms(modules: Sequence[nn.Module], mesh: DeviceMesh, stepped: Callable[[Tensor], Tensor], whole: Norms) -> Norms:
    """A function from parameters that have gradients to the norms of the whole gradients, [parameters].

    Its result is the same on every process of the axis, and every process has to call it. `stepped` returns the tensor
    that holds a parameter's gradient; `whole` returns the norms of the gradients that this process holds.
    """
    axis = Axis.of(mesh)
    cut = frozenset(stepped(module.get_parameter(name)) for module in modules for name in parameters_cut(module))

    def whole_norms(parameters: Sequence[Tensor]) -> Tensor:
        local_norms = whole(parameters)
        is_cut = [parameter in cut for parameter in parameters]
        if not any(is_cut):
            return local_norms
        cut_mask = torch.tensor(is_cut, device=local_norms.device)
        squares = axis.sum(torch.where(cut_mask, local_norms.square(), 0))
        return torch.where(cut_mask, squares.sqrt(), local_norms)

    return whole_norms


def parameters_cut(module: nn.Module) -> list[str]:
    """The paths of a module's parameters that are cut."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [path for path, _ in pieces(module) if path in parameters]
