"""Norms of gradients that are cut over the processes of a tensor axis."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.piece import pieces

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
