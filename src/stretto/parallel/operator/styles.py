"""Linear layers cut by torch's own styles: their parameters become DTensors.

torch's styles take what they are given as equal parts, so this is for what the axis divides; the rest goes to `layers`.
So do embeddings: behind torch's style (2.13) each process has a gradient of the whole table, still to be summed.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.role import Role


def fits(layer: nn.Module, role: Role) -> bool:
    """Whether torch's styles can do it."""
    equal = len(set(role.sizes)) == 1 and role.blocks == 1
    return equal and type(layer) is nn.Linear and role.style in ("column", "row")


def style(role: Role) -> ParallelStyle:
    """Torch's style for a role."""
    if role.style == "column":
        return ColwiseParallel(output_layouts=Shard(-1) if role.sliced else Replicate())
    return RowwiseParallel(input_layouts=Shard(-1) if role.sliced else Replicate())


def distribute(layer: nn.Module, role: Role, axis: Axis) -> None:
    """Give a layer its part. All processes hold the same weights by now: none are sent."""
    parallelize_module(layer, axis.mesh, style(role), src_data_rank=None)
    layer.register_forward_hook(fresh)


def fresh(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A copy: what comes out of a DTensor is a view, which nobody may change in place (ReLU(inplace=True))."""
    return output.clone()
