"""Linear layers cut by torch's own styles: their parameters become DTensors.

torch's styles assume parts of equal size, so they serve layers whose channels the axis divides; `cut_layers` cuts all
others, and embeddings: with torch's style (2.13) each process has a gradient of the whole table, still to be summed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.role import Role


def style(role: Role) -> ParallelStyle:
    if role.style == "column":
        return ColwiseParallel(output_layouts=Shard(-1) if role.sliced else Replicate())
    return RowwiseParallel(input_layouts=Shard(-1) if role.sliced else Replicate())


def distribute(layer: nn.Module, role: Role, axis: Axis) -> None:
    """Replace a layer's parameters by DTensors. All processes hold the same weights already, so none are sent."""
    layer.register_forward_pre_hook(refuse_slab)
    parallelize_module(layer, axis.mesh, style(role), src_data_rank=None)
    layer.register_forward_hook(copied)


def refuse_slab(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse a tensor that answers for torch's functions itself, as a slab of an image; a forward pre-hook."""
    kind = type(args[0])
    if kind is Tensor or kind.__torch_function__ is torch._C._disabled_torch_function_impl:
        return
    raise UsageError(
        f"stretto.parallel.tensor: the weights of {layer} are DTensors, which take plain tensors only, and its input "
        f'is a {kind.__name__} of an image: cut them with stretto.parallel.tensor(module, mesh, parameters="local")'
    )


def copied(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Copy the output: a DTensor's local tensor is a view, and an in-place ReLU behind the layer would fail on it."""
    return output.clone()
