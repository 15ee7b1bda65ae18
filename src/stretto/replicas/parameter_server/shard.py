"""The weights of a stage cut into shards, each with an optimizer of its own: what a parameter server holds.

Each shard has a piece of every parameter: some of its rows (dim 0), all of them, or none. So the function that builds
the optimizer gets a list of the same length for every shard.

    parameter      shard 0     shard 1
    [5, 1000]      rows 0-2    rows 3-4
    [1000]         all
    [10, 3]                    all
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.state_check import check_part, check_updates
from stretto.optim.loading import load
from stretto.optim.traits import is_elementwise, touches_only_rows
from stretto.schedule.even_split import bounds

SMALL = 4096  # elements; a tensor with fewer is not cut
Rows = tuple[int, int]  # first, end
Piece = Tensor | tuple[Tensor, Tensor] | None  # dense; or rows [n] and their values [n, ...]; or nothing
Build = Callable[[list[nn.Parameter]], tuple[torch.optim.Optimizer, Any]]  # the optimizer, and a scheduler or None


class Cut:
    """The rows of each parameter that each shard has.

    An optimizer that is not known to work elementwise gets whole tensors.
    """

    def __init__(self, parameters: Sequence[Tensor], shards: int, optimizer: torch.optim.Optimizer) -> None:
        self.shards = shards
        may_cut = is_elementwise(optimizer)
        num_elements = [0] * shards
        self._rows: list[list[Rows]] = []
        for parameter in parameters:
            length = rows_of(parameter)
            if may_cut and parameter.numel() >= SMALL and length >= shards:
                rows = [bounds(length, index, shards) for index in range(shards)]
            else:
                smallest = num_elements.index(min(num_elements))
                rows = [(0, length) if index == smallest else (0, 0) for index in range(shards)]
            for index, (begin, end) in enumerate(rows):
                num_elements[index] += (end - begin) * parameter[:1].numel() if parameter.dim() else end
            self._rows.append(rows)
        self.used = [count > 0 for count in num_elements]  # whether a shard has any element

    def rows(self, shard: int) -> list[Rows]:
        return [rows[shard] for rows in self._rows]

    def pieces(self, tensors: Sequence[Tensor | None], shard: int) -> list[Piece]:
        """A shard's pieces of tensors shaped as the parameters, such as their gradients; dense pieces are views."""
        if self.shards == 1:
            return list(tensors)
        return [
            None if tensor is None else piece_of(tensor, *rows)
            for tensor, rows in zip(tensors, self.rows(shard), strict=True)
        ]


class Shard:
    """Pieces of a stage's parameters on the CPU, and their optimizer. A version is a number of updates."""

    def __init__(self, pieces: Sequence[Tensor], replicas: int, build: Build) -> None:
        self.parameters = [nn.Parameter(piece.detach().cpu().clone()) for piece in pieces]
        self.optimizer, self.scheduler = build(self.parameters)
        self.version = 0
        self._seen = [0] * replicas  # the version that each replica has
        self._whole = [0] * len(pieces)  # the version that last changed a piece as a whole
        self._rows: dict[int, Tensor] = {}  # of pieces with sparse gradients: the version that last changed each row

    def update(self, replica: int, gradients: Sequence[Piece]) -> tuple[Piece, ...]:
        """Step the optimizer once; return what has changed since the replica's last call, not copied."""
        self.version += 1
        lazy = touches_only_rows(self.optimizer)
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.grad = None if gradient is None else as_gradient(gradient, parameter)
            if parameter.grad is not None and parameter.grad.is_sparse and lazy:
                rows = self._rows.setdefault(index, torch.zeros(len(parameter), dtype=torch.int64))
                rows[parameter.grad._indices()[0]] = self.version
            elif parameter.grad is not None:
                self._whole[index] = self.version
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        return self.changes(replica)

    def changes(self, replica: int) -> tuple[Piece, ...]:
        """What has changed since the replica's last call: of each parameter its piece, its changed rows, or None."""
        since, self._seen[replica] = self._seen[replica], self.version
        return tuple(self._change(index, since) for index in range(len(self.parameters)))

    def _change(self, index: int, since: int) -> Piece:
        weights = self.parameters[index].detach()
        if self._whole[index] > since:
            return weights
        if index not in self._rows:
            return None
        (rows,) = torch.nonzero(self._rows[index] > since, as_tuple=True)
        return (rows, weights[rows]) if len(rows) else None

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scheduler and version; not the weights, which every replica's checkpoint has."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scheduler": scheduler, "version": self.version}

    def check(self, state: Mapping[str, Any]) -> None:
        if (state["scheduler"] is None) != (self.scheduler is None):
            names = ["no scheduler" if side is None else "a scheduler" for side in (state["scheduler"], self.scheduler)]
            raise ValueError(f"the state has {names[0]}, and this trainer has {names[1]}")
        check_part(state["optimizer"], self.optimizer)
        if self.scheduler is not None:
            check_part(state["scheduler"], self.scheduler)
        check_updates(state["version"])

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """Load what `state_dict` returned, and the weights `pieces`, which all replicas have."""
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            assert isinstance(piece, Tensor), "weights are dense"
            parameter.copy_(piece)
        load(self.optimizer, state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.version = state["version"]
        self._seen = [self.version] * len(self._seen)
        self._whole = [0] * len(self._whole)
        self._rows.clear()


@torch.no_grad()
def take(parameters: Sequence[Tensor], rows: Sequence[Rows], changes: Sequence[Piece]) -> None:
    """Write a shard's answer into the parameters, in place."""
    for parameter, (begin, end), change in zip(parameters, rows, changes, strict=True):
        if change is None:
            continue
        piece = parameter[begin:end] if parameter.dim() else parameter
        if isinstance(change, Tensor):
            piece.copy_(change)
        else:
            piece[change[0].to(piece.device)] = change[1].to(piece.device)


def rows_of(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def piece_of(tensor: Tensor, begin: int, end: int) -> Piece:
    """Rows [begin, end) of a tensor. Of a sparse tensor: the rows that it has, numbered from `begin`, and their values.

    Raises UsageError for a tensor that is sparse in more than one dimension.
    """
    if not tensor.is_sparse:
        whole = (begin, end) == (0, rows_of(tensor))
        return tensor if whole else tensor[begin:end] if tensor.dim() else tensor.reshape(1)[:0]
    if tensor.sparse_dim() != 1:
        raise UsageError(
            f"a gradient {tuple(tensor.shape)} is sparse in {tensor.sparse_dim()} dimensions: a parameter server takes "
            "gradients that are sparse in rows, as those of embeddings; make it dense"
        )
    tensor = tensor.coalesce()
    indices = tensor.indices()[0]
    first, last = torch.searchsorted(indices, torch.tensor([begin, end], device=indices.device)).tolist()
    return indices[first:last] - begin, tensor.values()[first:last]


def as_gradient(piece: Tensor | tuple[Tensor, Tensor], parameter: Tensor) -> Tensor | None:
    """A piece as the gradient of a shard's parameter; None if the parameter has no elements."""
    if parameter.numel() == 0:
        return None
    if isinstance(piece, Tensor):
        return piece.to(parameter.device)
    rows, values = (tensor.to(parameter.device) for tensor in piece)
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False)
