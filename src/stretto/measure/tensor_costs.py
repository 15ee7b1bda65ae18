"""What layers cost each process of a tensor axis: they are cut as training cuts them, and their exchanges counted.

No other process is there: an axis that only counts stands in for the real one, and tensors have no numbers.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.layer_table import EXCHANGES, LayerCost, ModelCosts, Works
from stretto.measure.aten_costs import Operators
from stretto.measure.layer_flops import Inputs, alike, faking, layer_costs
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.preparation import cut_module
from stretto.parallel.operator.sequence import CutInput
from stretto.parallel.operator.span import SequenceParts


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
    sequence: bool = False,
    recompute: str = "none",
) -> ModelCosts:
    """The costs of `layers`, as one stage, to each of `parts` processes that share their weights; as `layer_costs`.

    `forward_exchanges` and `backward_exchanges` of a row are what its processes send each other. With `sequence`
    transformer blocks work on parts of the sequence outside their cut pairs, and pass them to each other. Raises
    UsageError for layers that cannot be cut so.
    """
    counted_as = representatives(layers)
    indices = sorted(set(counted_as))
    whole = nn.Sequential(*(layers[index] for index in indices))
    with faking():
        numberless: dict[int, Any] = {id(own): like(own) for own in (*whole.parameters(), *whole.buffers())}
        cut = cut_module(copy.deepcopy(whole, numberless), CountedAxis.of_size(parts), {}, sequence=sequence)
        for parts_of_sequence in {id(each): each for each in sequence_parts(cut)}.values():
            parts_of_sequence.running = True  # layers run one by one, and not by their container
        costs = layer_costs(list(cut.children()), example, loss=loss, target=target, recompute=recompute)
    rows = dict(zip(indices, map(with_exchanges, costs.layers), strict=False))
    each = [replace(rows[index], name=str(layer)) for layer, index in enumerate(counted_as)]
    ends = map(with_exchanges, costs.layers[len(indices) :])  # the loss
    return replace(costs, layers=(*each, *ends), ties=())


def representatives(layers: Sequence[nn.Module]) -> list[int]:
    """For each layer, one that costs the same: of three and more alike in a row, the second stands for all inside."""
    keys = list(map(alike, layers))
    inside = [0 < k < len(keys) - 1 and keys[k - 1] == keys[k] == keys[k + 1] for k in range(len(keys))]
    found: list[int] = []
    for layer, is_inside in enumerate(inside):
        found.append(found[-1] if is_inside and inside[layer - 1] else layer)
    return found


def sequence_parts(module: nn.Module) -> Iterator[SequenceParts]:
    """What the blocks of a module cut sequences with."""
    for part in module.modules():
        yield from (hook.parts for hook in part._forward_pre_hooks.values() if isinstance(hook, CutInput))


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
