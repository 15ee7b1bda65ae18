"""Norms of gradients of which each process has a part."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.piece import pieces

Norms = Callable[[Sequence[Tensor]], Tensor]


def norms(modules: Sequence[nn.Module], mesh: DeviceMesh, stepped: Callable[[Tensor], Tensor], whole: Norms) -> Norms:
    """Norms of the gradients of `modules`, [number of gradients]: the same on every process, which all have to ask.

    `stepped` gives the tensor that collects a parameter's gradient, `whole` the norms of what is not cut.
    """
    axis = Axis.of(mesh)
    cut = frozenset(stepped(module.get_parameter(name)) for module in modules for name in parameters_cut(module))

    def taken(parameters: Sequence[Tensor]) -> Tensor:
        alone = whole(parameters)
        is_cut = [parameter in cut for parameter in parameters if parameter.grad is not None]
        if not any(is_cut):
            return alone
        partly = torch.tensor(is_cut, device=alone.device)
        squares = axis.sum(torch.where(partly, alone.square(), 0))
        return torch.where(partly, squares.sqrt(), alone)

    return taken


def parameters_cut(module: nn.Module) -> list[str]:
    """The parameters that a module holds parts of, by path."""
    known = dict(module.named_parameters(remove_duplicate=False))
    return [name for name, _ in pieces(module) if name in known]
