"""Modules of whose weights each replica keeps a share (torch's FSDP2, DTensors): what others need to know of them."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_share(tensor: object) -> bool:
    """Whether it is this process's share of a tensor."""
    known = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor who has not imported it
    return known is not None and isinstance(tensor, known.DTensor)


def is_sharded(module: nn.Module | None) -> bool:
    """Whether the module's weights are shares, or it is gathered for a while."""
    return module is not None and bool(groups_of(module))


def groups_of(module: nn.Module) -> list[Any]:
    """Its parts whose weights are gathered and given up together (FSDPModule)."""
    known = sys.modules.get("torch.distributed.fsdp")
    return [] if known is None else [part for part in module.modules() if isinstance(part, known.FSDPModule)]


def gathered(module: nn.Module) -> list[nn.Parameter]:
    """Its whole trainable weights: what a backward through it fills the gradients of. A collective of the replicas.

    They are given up after that backward, or by `release`.
    """
    for group in groups_of(module):
        group.unshard()
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def release(module: nn.Module) -> None:
    """Keep no more than the share: what is gathered next will have the values that the shares then have."""
    for group in groups_of(module):
        group.reshard()


def local(tensor: Tensor) -> Tensor:
    """The share that is here, as a plain tensor that shares its storage; any other tensor as it is."""
    if not is_share(tensor):
        return tensor
    share: Any = tensor
    here: Tensor = share.to_local()
    return here


def whole(state: Any) -> Any:
    """A state_dict with whole tensors in place of shares. A collective of the replicas where there are some."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if is_share(state) else state


def shares(state: Mapping[str, Any], part: object) -> Mapping[str, Any]:
    """Of a `whole` state_dict what `part`, a module or an optimizer, is to load here; no messages."""
    if isinstance(part, nn.Module) and is_sharded(part):
        own = part.state_dict()
        return {name: share_like(value, own.get(name)) for name, value in state.items()}
    if isinstance(part, torch.optim.Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        if any(map(is_share, parameters)):
            kept = {
                index: {name: share_like(value, parameters[int(index)]) for name, value in each.items()}
                for index, each in state["state"].items()
                if int(index) < len(parameters)
            }
            return {**state, "state": kept}
    return state


def share_like(value: Any, share: Any) -> Any:
    """This process's share of a whole tensor that is cut as `share` is; what has another shape stays whole."""
    if not (isinstance(value, Tensor) and is_share(share) and value.shape == share.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(share.device), share.device_mesh, share.placements, src_data_rank=None)
