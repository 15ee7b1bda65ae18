"""What the table of optimizers (`optimizers.py`) says of an optimizer at hand, and whether it fits what is asked."""

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import torch

from stretto.errors import UsageError
from stretto.nn.sharded_modules import is_share
from stretto.optim.muon_with_adamw import CombinedOptimizer
from stretto.optimizers import MATRICES, OPTIMIZERS, OTHERS, Optimizer

PACKAGES = ("torch.optim", "stretto.optim")
ROWS = {row.place: row for row in (*OPTIMIZERS.values(), *OTHERS)}
ELEMENTWISE = "an optimizer that works on each element (SGD, Adam, Lion)"


@cache
def row_of_class(kind: type) -> Optimizer | None:
    """The row of exactly this class."""
    package = next((package for package in PACKAGES if kind.__module__.startswith(package)), "")
    return ROWS.get(f"{package}:{kind.__name__}")


def row_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Optimizer | None:
    """The row of the class that steps a group, or of the nearest one that this is derived from."""
    if isinstance(optimizer, CombinedOptimizer):
        return OPTIMIZERS[group["rule"].lower()]
    return next(filter(None, map(row_of_class, type(optimizer).__mro__)), None)


def rows_of(optimizer: torch.optim.Optimizer) -> list[Optimizer | None]:
    return [row_of(optimizer, group) for group in optimizer.param_groups]


@cache
def function_of(place: str) -> Callable[..., Any]:
    found: Callable[..., Any] = pkgutil.resolve_name(place)
    return found


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is known to change each element by its own gradients and state; not of a derived class."""
    kind: type = type(optimizer)
    row = row_of_class(kind)
    return row is not None and not row.whole


def touches_only_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with a sparse gradient surely changes no rows but the gradient's own."""
    known = all(row is not None and row.rows_only for row in rows_of(optimizer))
    return known and all(group.get("momentum", 0) == 0 for group in optimizer.param_groups)


def refuse_parts(optimizer: torch.optim.Optimizer, axis: str, stage: int) -> None:
    """Raise UsageError for an optimizer that needs whole layers, of which each process of `axis` has a part."""
    for row, group in zip(rows_of(optimizer), optimizer.param_groups, strict=True):
        if row is not None and row.whole:
            raise UsageError(
                f"{group.get('rule', type(optimizer).__name__)} needs {row.whole}, of which each process has a part "
                f"({axis}, stage {stage}): use tensor=1, or {ELEMENTWISE}"
            )


def check_shares(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Raise UsageError for an optimizer that cannot step a replica's share of a matrix (fully-shard)."""
    for row, group in zip(rows_of(optimizer), optimizer.param_groups, strict=True):
        share = next((p for p in group["params"] if is_share(p) and p.dim() > 1), None)
        if share is not None and row is not None and row.whole == MATRICES and not row.gathers:
            is_muon = isinstance(optimizer, torch.optim.Muon)
            raise UsageError(
                f"{type(optimizer).__name__} needs whole matrices, but each replica has a share of the matrix "
                f"{list(share.shape)} of stage {stage} (fully-shard): use sync='all-reduce', or "
                f"{'stretto.optim.muon, which gathers them' if is_muon else ELEMENTWISE}"
            )


def check_known(optimizer: torch.optim.Optimizer, what: Literal["ahead", "late"], use: str, remedy: str) -> None:
    """Raise UsageError unless the table knows `what` of the optimizer, and an SGD's step is `w <- w - lr v`."""
    if isinstance(optimizer, torch.optim.SGD) or not all(row and getattr(row, what) for row in rows_of(optimizer)):
        places = [row.place for name, row in OPTIMIZERS.items() if getattr(row, what) and name != "sgd"]
        *names, last = (place.partition(":")[2] for place in places)
        check_momentum(optimizer, f"{use} takes {', '.join(names)} and {last}; of others it", remedy)


def check_momentum(optimizer: torch.optim.Optimizer, what: str, remedy: str) -> None:
    """Raise UsageError unless the optimizer's velocity is `v <- m v + g` and its step `w <- w - lr v`."""
    needs = f"{what} wants torch.optim.SGD with 0 < momentum < 1, without Nesterov and without dampening"
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(f"{needs}; this optimizer is {type(optimizer).__name__}: {remedy}")
    for group in optimizer.param_groups:
        if not has_plain_momentum(group):
            values = ", ".join(f"{key}={group[key]}" for key in ("momentum", "nesterov", "dampening"))
            raise UsageError(f"{needs}; this one has {values}: {remedy}")


def has_plain_momentum(group: Mapping[str, Any]) -> bool:
    """Whether a group of SGD has momentum, without Nesterov's and without dampening."""
    return 0 < group["momentum"] < 1 and not group["nesterov"] and group["dampening"] == 0


def momenta_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Each group's momentum: that of SGD and Muon, the first beta of Adam and its kin, 0 where there is neither."""
    groups = optimizer.param_groups
    return [float(group["betas"][0] if group.get("betas") else group.get("momentum", 0.0)) for group in groups]
