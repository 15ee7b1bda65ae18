"""The weights of a stage cut into shards, each with an optimizer of its own: what a parameter server holds.

Each shard has a piece of every parameter: some of its rows (dim 0), all of them, or none. So whoever builds the
optimizer gets the same list everywhere.

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
from stretto.schedule.even_split import bounds

SMALL = 4096  # numbers; a tensor with fewer is not cut
Rows = tuple[int, int]  # from, until
Piece = Tensor | tuple[Tensor, Tensor] | None  # dense; or rows [n] and their values [n, ...]; or nothing
Build = Callable[[list[nn.Parameter]], tuple[torch.optim.Optimizer, Any]]  # the optimizer, and a scheduler or None

# What these do to a number depends on nothing but its own gradients.
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam, torch.optim.Adagrad,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


class Cut:
    """Which rows of each parameter each shard has; an optimizer that is not known to work elementwise gets tensors
    whole.
    """

    def __init__(self, parameters: Sequence[Tensor], shards: int, optimizer: torch.optim.Optimizer) -> None:
        self.shards = shards
        may_cut = type(optimizer) in ELEMENTWISE
        held = [0] * shards  # numbers
        self._rows: list[list[Rows]] = []
        for parameter in parameters:
            length = rows_of(parameter)
            if may_cut and parameter.numel() >= SMALL and length >= shards:
                own = [bounds(length, index, shards) for index in range(shards)]
            else:
                whole = held.index(min(held))
                own = [(0, length) if index == whole else (0, 0) for index in range(shards)]
            for index, (begin, end) in enumerate(own):
                held[index] += (end - begin) * parameter[:1].numel() if parameter.dim() else end
            self._rows.append(own)
        self.used = [count > 0 for count in held]  # whether a shard has anything

    def rows(self, shard: int) -> list[Rows]:
        """Of each parameter."""
        return [own[shard] for own in self._rows]

    def pieces(self, tensors: Sequence[Tensor | None], shard: int) -> list[Piece]:
        """A shard's part of tensors like the parameters, such as their gradients; dense ones are views."""
        if self.shards == 1:
            return list(tensors)
        return [
            None if tensor is None else piece_of(tensor, *rows)
            for tensor, rows in zip(tensors, self.rows(shard), strict=True)
        ]


class Shard:
    """Pieces of a stage's parameters on the CPU, and what steps them. Versions are counted in updates."""

    def __init__(self, pieces: Sequence[Tensor], replicas: int, build: Build) -> None:
        self.parameters = [nn.Parameter(piece.detach().cpu().clone()) for piece in pieces]
        self.optimizer, self.scheduler = build(self.parameters)
        self.version = 0
        self._seen = [0] * replicas  # the version that each replica has
        self._whole = [0] * len(pieces)  # the version that last changed a piece as a whole
        self._rows: dict[int, Tensor] = {}  # of pieces with sparse gradients: the version that last changed each row

    def update(self, replica: int, gradients: Sequence[Piece]) -> tuple[Piece, ...]:
        """Step once; returns what has changed since the replica last asked, not copied."""
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
        """What has changed since the replica last asked."""
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
        """What steps the weights; not the weights, which every replica has."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scheduler": scheduler, "version": self.version}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, TypeError or KeyError for what is no state of this one."""
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError("a scheduler is there or here, and not on the other side")
        check_part(state["optimizer"], self.optimizer)
        if self.scheduler is not None:
            check_part(state["scheduler"], self.scheduler)
        check_updates(state["version"])

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """Go on from there, with these weights, which all replicas have."""
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
        mine = parameter[begin:end] if parameter.dim() else parameter
        if isinstance(change, Tensor):
            mine.copy_(change)
        else:
            mine[change[0].to(mine.device)] = change[1].to(mine.device)


def rows_of(tensor: Tensor) -> int:
    """How long dim 0 is; a number without dimensions is one row."""
    return tensor.shape[0] if tensor.dim() else 1


def piece_of(tensor: Tensor, begin: int, end: int) -> Piece:
    """Rows of a tensor; a sparse one's as the rows that it has, numbered from `begin`."""
    if not tensor.is_sparse:
        whole = (begin, end) == (0, rows_of(tensor))
        return tensor if whole else tensor[begin:end] if tensor.dim() else tensor.reshape(1)[:0]
    if tensor.sparse_dim() != 1:
        raise UsageError(
            f"a gradient {tuple(tensor.shape)} that is sparse in {tensor.sparse_dim()} dimensions: a parameter server "
            "takes those of embeddings, which are sparse in rows; make it dense"
        )
    tensor = tensor.coalesce()
    indices = tensor.indices()[0]
    first, last = torch.searchsorted(indices, torch.tensor([begin, end], device=indices.device)).tolist()
    return indices[first:last] - begin, tensor.values()[first:last]


def as_gradient(piece: Tensor | tuple[Tensor, Tensor], parameter: Tensor) -> Tensor | None:
    """A piece as the gradient of a shard's parameter; an empty one is none."""
    if parameter.numel() == 0:
        return None
    if isinstance(piece, Tensor):
        return piece.to(parameter.device)
    rows, values = (each.to(parameter.device) for each in piece)
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False)


def touches_only_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a sparse gradient changes no other rows than its own; others are taken to change everything."""
    if isinstance(optimizer, torch.optim.SGD):
        return all(group["momentum"] == 0 for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.SparseAdam | torch.optim.Adagrad)
