"""Which optimizers need whole matrices, and where a process has only a part of them: refused by name."""

import torch

from stretto.errors import UsageError
from stretto.nn.sharded_modules import is_share
from stretto.optim.combined import CombinedOptimizer
from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.soap import SOAP

ELEMENTWISE = "an optimizer that works on each element (SGD, Adam, Lion)"


def refuse_parts(optimizer: torch.optim.Optimizer, axis: str, stage: int) -> None:
    """Raise UsageError for an optimizer that needs whole layers, of which each process of `axis` has a part."""
    needs = None
    if isinstance(optimizer, LARS | LAMB):
        needs = f"{type(optimizer).__name__} needs the norms of whole layers"
    elif isinstance(optimizer, SOAP | torch.optim.Muon):
        needs = f"{type(optimizer).__name__} needs whole matrices"
    elif isinstance(optimizer, CombinedOptimizer) and optimizer.has_rule("Muon"):
        needs = "Muon orthogonalises whole matrices"
    if needs is not None:
        raise UsageError(
            f"{needs}, of which each process has a part ({axis}, stage {stage}): use tensor=1, or {ELEMENTWISE}"
        )


def check_shares(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Raise UsageError for an optimizer that cannot step a replica's share of a matrix (fully-shard)."""
    if not isinstance(optimizer, SOAP | torch.optim.Muon):
        return
    share = next((p for group in optimizer.param_groups for p in group["params"] if is_share(p) and p.dim() > 1), None)
    if share is not None:
        instead = "stretto.optim.muon, which gathers them" if isinstance(optimizer, torch.optim.Muon) else ELEMENTWISE
        raise UsageError(
            f"{type(optimizer).__name__} needs whole matrices, but each replica has a share of the matrix "
            f"{list(share.shape)} of stage {stage} (fully-shard): use sync='all-reduce', or "
            f"{instead}"
        )
