"""What layers cost each process of a tensor axis: they are cut as training cuts them, and their exchanges counted.

No other process is there: an axis that only counts stands in for the real one, and tensors have no numbers.
"""

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.layer_table import EXCHANGES, LayerCost, ModelCosts, Works
from stretto.measure.aten_costs import Operators
from stretto.measure.layer_counting import LayerCounting
from stretto.measure.layer_flops import layer_costs
from stretto.measure.traced_layers import Inputs
from stretto.models.published_network import PublishedNetwork
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.preparation import cut_module
from stretto.parallel.operator.sequence import CutInput
from stretto.parallel.operator.span import SequenceParts

SUMS_OF_LOSS = 3  # over processes that have a part of the classes each


@dataclass(frozen=True, eq=False)
class CountedAxis(Axis):
    """An axis of so many processes of which this is the first: it sends nothing, and counts what would be sent.

    `in_place`: tensors are summed where they are, without a copy.
    """

    in_place: bool = False
    draws = False

    @classmethod
    def of_size(cls, size: int, *, in_place: bool = False) -> "CountedAxis":
        """The axis as the first of `size` processes sees it."""
        nothing: Any = None
        return cls(nothing, nothing, size, 0, in_place)

    def sum(self, x: Tensor) -> Tensor:
        """A tensor like the sum over processes."""
        count(TENSOR_SUM, x)
        return x.view_as(x) if self.in_place else x.clone(memory_format=torch.contiguous_format)

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


class HowCounted(TypedDict, total=False):
    """How layers are run to be counted; as the arguments of `layer_costs`."""

    recompute: str
    autocast: torch.dtype | None
    fake: LayerCounting


def tensor_costs(
    layers: Sequence[nn.Module],
    example: Tensor | Inputs,
    parts: int,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    target: Tensor | None = None,
    plan: Mapping[str, str] | None = None,
    in_place: bool = False,
    sequence: bool = False,
    **how: Unpack[HowCounted],
) -> ModelCosts:
    """The costs of `layers`, as one stage, to each of `parts` processes that share their weights; as `layer_costs`.

    `forward_exchanges` and `backward_exchanges` of a row are what its processes send each other. `plan` gives styles by
    path, as that of `stretto.parallel.tensor`; with `in_place` sums take no copies. With `sequence` transformer blocks
    work on parts of the sequence outside their cut pairs, and pass them to each other. Raises UsageError for layers
    that cannot be cut so.
    """
    whole = nn.Sequential(*layers)
    counting = how["fake"] = how.get("fake") or LayerCounting()
    with counting.numberless():
        numberless: dict[int, Any] = {id(own): like(own, counting) for own in (*whole.parameters(), *whole.buffers())}
        axis = CountedAxis.of_size(parts, in_place=in_place)
        cut = cut_module(copy.deepcopy(whole, numberless), axis, plan or {}, sequence=sequence)
    for parts_of_sequence in sequence_parts(cut):
        parts_of_sequence.running = True  # layers run one by one, and not by their container
    return with_exchanges(layer_costs(list(cut.children()), example, loss=loss, target=target, **how))


def sequence_parts(module: nn.Module) -> Iterator[SequenceParts]:
    """What the blocks of a module cut sequences with."""
    for part in module.modules():
        yield from (hook.parts for hook in part._forward_pre_hooks.values() if isinstance(hook, CutInput))


def published_tensor_costs(
    network: PublishedNetwork,
    layers: Sequence[nn.Module],
    inputs: tuple[Tensor, Tensor],
    parts: int,
    whole: ModelCosts,
    *,
    sequence: bool = False,
    **how: Unpack[HowCounted],
) -> ModelCosts:
    """The same for a network without data, as Megatron runs it; `inputs` are an input batch and its target.

    Of consecutive layers whose rows in `whole` are equal one is cut and counted; with `sequence`, of which the first
    cuts its input and the last gathers its output, three. Where `network.classes` names the
    layer that scores classes, each process scores its part of them, and the loss sums three numbers of each token:
    the largest score, the sum of exponentials, the target's score. Tied weights are cut
    alike.
    """
    rows = [replace(row, name="") for row in whole.layers]
    kept = representatives(rows[: len(layers)], ends=sequence)
    plan, loss = {}, network.loss
    if network.classes is not None:
        plan = {f"{len(kept) - 1}.{network.classes}": "column-sliced"}
        loss = partial(parted_loss, network.loss)
    if network.tied is not None:
        plan[f"0.{network.tied[0].rpartition('.')[0]}"] = "vocabulary"
    x, y = inputs
    chosen = [layers[index] for index in kept]
    counted = tensor_costs(chosen, x, parts, loss=loss, target=y, plan=plan, in_place=True, sequence=sequence, **how)
    numbers = [bisect_right(kept, index) - 1 for index in range(len(layers))]
    cut_rows = [
        replace(counted.layers[number], name=row.name) for number, row in zip(numbers, whole.layers, strict=False)
    ]
    cut_rows = [summed_once(row) if sequence else row for row in cut_rows]
    ties = tuple(replace(tie, bytes=tie.bytes / parts) for tie in whole.ties)
    return replace(counted, layers=(*cut_rows, *counted.layers[len(kept) :]), ties=ties, read_rows=())


def summed_once(row: LayerCost) -> LayerCost:
    """A block on parts of the sequence that does not sum its norms' gradients in each backward, but once a step.

    As Megatron does, with those of biases behind rows; all of a stage in one sum.
    """
    if not any(work.operator == TENSOR_SCATTER for work in row.forward_exchanges or ()):
        return row
    others = tuple(work for work in row.backward_exchanges or () if work.operator != TENSOR_SUM)
    sums = sum(work.bytes.fixed for work in row.backward_exchanges or () if work.operator == TENSOR_SUM)
    return replace(row, backward_exchanges=others, summed_once=sums)


def representatives(rows: Sequence[LayerCost], *, ends: bool) -> list[int]:
    """The first of equal rows one after the other; with `ends`, also the second and the last."""
    starts = [index for index in range(len(rows)) if index == 0 or rows[index] != rows[index - 1]]
    if not ends:
        return starts
    lasts = [start - 1 for start in (*starts[1:], len(rows))]
    return sorted({*starts, *(min(a + 1, b) for a, b in zip(starts, lasts, strict=True)), *lasts})


def parted_loss(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Tensor:
    """A loss of a part of the classes, and the sums over processes that complete it."""
    for _ in range(SUMS_OF_LOSS):
        count(TENSOR_SUM, target.new_empty(target.shape, dtype=torch.float32))
    return loss(output, target)


def like(tensor: Tensor, counting: LayerCounting) -> Tensor:
    """A tensor, or a parameter, of the same shape and without numbers."""
    empty = counting.empty(tensor.detach())
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def with_exchanges(costs: ModelCosts) -> ModelCosts:
    """Rows whose exchanges stand beside their other work; equal works stay one object."""
    known: dict[tuple[int, bool], Works] = {}

    def divided(works: Works, *, sent: bool) -> Works:
        chosen = tuple(work for work in works if (work.operator in EXCHANGES) == sent)
        return known.setdefault((id(works), sent), chosen)

    def beside(row: LayerCost) -> LayerCost:
        return replace(
            row,
            **{key: divided(getattr(row, key), sent=False) for key in PASSES},  # type: ignore[arg-type]
            forward_exchanges=divided(row.forward, sent=True),
            backward_exchanges=divided(row.backward, sent=True),
        )

    reading = tuple((index, beside(row)) for index, row in costs.read_rows)
    return replace(costs, layers=tuple(map(beside, costs.layers)), read_rows=reading)


PASSES = ("forward", "backward", "input_gradient", "weight_gradient")
