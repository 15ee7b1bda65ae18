"""Modules whose weights are sharded over the replicas (torch's FSDP2): each replica keeps a share as DTensors."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_share(tensor: object) -> bool:
    """Whether it is a DTensor: this process's share of a tensor."""
    loaded = sys.modules.get("torch.distributed.tensor")  # before its import no DTensor exists
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def is_sharded(module: nn.Module | None) -> bool:
    """Whether the module's weights are sharded, also while they are gathered."""
    return module is not None and bool(groups_of(module))


def groups_of(module: nn.Module) -> list[Any]:
    """The submodules whose weights are gathered and released together (FSDPModule)."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return [] if loaded is None else [part for part in module.modules() if isinstance(part, loaded.FSDPModule)]


def gathered(module: nn.Module) -> list[nn.Parameter]:
    """Gather the module's weights and return the trainable ones, whole. A collective of the replicas.

    A backward through the module fills their gradients and then releases them; `release` does it without a backward.
    """
    for group in groups_of(module):
        group.unshard()
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def release(module: nn.Module) -> None:
    """Free the gathered weights and keep the share; the next `gathered` reads the shares' values of that time."""
    for group in groups_of(module):
        group.reshard()


def local_share(tensor: Tensor) -> Tensor:
    """This process's share as a plain tensor of the same storage; any other tensor as it is."""
    if not is_share(tensor):
        return tensor
    share: Any = tensor
    plain: Tensor = share.to_local()
    return plain


def whole_state(state: Any) -> Any:
    """A state_dict with whole tensors in place of shares. If it has shares, a collective of the replicas."""
    if isinstance(state, Mapping):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole_state(value) for value in state]
    return state.full_tensor() if is_share(state) else state


def local_state(state: Mapping[str, Any], part: object) -> Mapping[str, Any]:
    """This process's shares of a `whole_state`, for `part` (a module or an optimizer) to load. Sends no messages."""
    if isinstance(part, nn.Module) and is_sharded(part):
        current = part.state_dict()
        return {name: share_like(value, current.get(name)) for name, value in state.items()}
    if isinstance(part, torch.optim.Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        if any(map(is_share, parameters)):
            local = {
                index: {name: share_like(value, parameters[int(index)]) for name, value in values.items()}
                for index, values in state["state"].items()
                if int(index) < len(parameters)
            }
            return {**state, "state": local}
    return state


def share_like(value: Any, share: Any) -> Any:
    """This process's share of a whole tensor, sharded as `share` is; a value of another shape stays whole."""
    if not (isinstance(value, Tensor) and is_share(share) and value.shape == share.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(share.device), share.device_mesh, share.placements, src_data_rank=None)
