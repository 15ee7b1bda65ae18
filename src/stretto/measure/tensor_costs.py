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
from stretto.cost.layer_table import EXCHANGES, ModelCosts, Works
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
        return with_exchanges(layer_costs(list(cut.children()), example, loss=loss, target=target))


def like(tensor: Tensor) -> Tensor:
    """A tensor, or a parameter, of the same shape and without numbers."""
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def with_exchanges(costs: ModelCosts) -> ModelCosts:
    """Rows whose exchanges stand beside their other work; equal works stay one object."""
    known: dict[tuple[int, bool], Works] = {}

    def divided(works: Works, *, sent: bool) -> Works:
        chosen = tuple(work for work in works if (work.operator in EXCHANGES) == sent)
        return known.setdefault((id(works), sent), chosen)

    rows = [
        replace(
            row,
            **{key: divided(getattr(row, key), sent=False) for key in PASSES},  # type: ignore[arg-type]
            forward_exchanges=divided(row.forward, sent=True),
            backward_exchanges=divided(row.backward, sent=True),
        )
        for row in costs.layers
    ]
    return replace(costs, layers=tuple(rows))


PASSES = ("forward", "backward", "input_gradient", "weight_gradient")
