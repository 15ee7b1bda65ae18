"""What layers cost each process of a tensor axis: they are cut as training cuts them, and their exchanges counted.

No other process is there: an axis that only counts stands in for the real one, and tensors have no numbers.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.layer_table import EXCHANGES, LayerCost, ModelCosts, Works
from stretto.measure.aten_costs import Operators
from stretto.measure.layer_flops import Inputs, faking, layer_costs
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.preparation import cut_module


@dataclass(frozen=True, eq=False)
class CountedAxis(Axis):
    """An axis of so many processes of which this is the first: it sends nothing, and counts what would be sent."""

    draws = False

    @classmethod
    def of_size(cls, size: int) -> "CountedAxis":
        """The axis as the first of `size` processes sees it."""
        nothing: Any = None
        return cls(nothing, nothing, size, 0)

    def sum(self, x: Tensor) -> Tensor:
        """A tensor like the sum over processes."""
        count(TENSOR_SUM, x)
        return x.clone(memory_format=torch.contiguous_format)

    def join(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """A tensor like the whole one."""
        whole = x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim:][1:])
        count(TENSOR_GATHER, whole)
        return whole

    def part_of_sum(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """A tensor like this process's part of the sum."""
        count(TENSOR_SCATTER, x)
        return self.part(x, dim, sizes)

    def align(self, *tensors: Tensor) -> None:
        """Leave the tensors as they are."""


def count(exchange: str, whole: Tensor) -> None:
    """Add an exchange of a tensor, whose whole is given, to what is being counted."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, Operators):
            done = mode.done[exchange]
            done[0], done[2] = done[0] + 1, done[2] + whole.numel() * whole.element_size()


def tensor_costs(
    layers: Sequence[nn.Module],
    example: Tensor | Inputs,
    parts: int,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    target: Tensor | None = None,
) -> ModelCosts:
    """The costs of `layers`, as one stage, to each of `parts` processes that share their weights; as `layer_costs`.

    `forward_exchanges` and `backward_exchanges` of a row are what its processes send each other.
    """
    whole = nn.Sequential(*layers)
    with faking():
        numberless: dict[int, Any] = {id(own): like(own) for own in (*whole.parameters(), *whole.buffers())}
        cut = cut_module(copy.deepcopy(whole, numberless), CountedAxis.of_size(parts), {})
        costs = layer_costs(list(cut.children()), example, loss=loss, target=target)
    return replace(costs, layers=tuple(map(with_exchanges, costs.layers)))


def like(tensor: Tensor) -> Tensor:
    """A tensor, or a parameter, of the same shape and without numbers."""
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def with_exchanges(row: LayerCost) -> LayerCost:
    """A row whose exchanges stand beside its other work."""

    def divided(works: Works) -> tuple[Works, Works]:
        sent = tuple(work for work in works if work.operator in EXCHANGES)
        return tuple(work for work in works if work.operator not in EXCHANGES), sent

    forward, forward_exchanges = divided(row.forward)
    backward, backward_exchanges = divided(row.backward)
    return replace(
        row,
        forward=forward,
        backward=backward,
        input_gradient=divided(row.input_gradient)[0],
        weight_gradient=divided(row.weight_gradient)[0],
        forward_exchanges=forward_exchanges,
        backward_exchanges=backward_exchanges,
    )
