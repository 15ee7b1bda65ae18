"""Checks that a loss is a mean over examples, which allows cutting a minibatch into parts, by calling the loss.

A mean over tokens that are not ignored, or one with class weights, is no mean over examples. In every minibatch,
neighbouring parts are compared with the two joined (`comparison.py`). On the first ones, and on ever fewer later ones,
the loss of made-up outputs on the minibatch's real targets is compared with what its parts' losses come to, also with
some targets marked as ignored, as padding in later minibatches may be: what will fail is refused before it is trained.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from stretto.errors import UsageError
from stretto.losses.comparison import (
    FAILURES,
    UNLESS,
    Neighbours,
    compare,
    is_whole,
    preserved_buffers,
    refusal,
    repeated,
)
from stretto.losses.cross_entropy import Sum
from stretto.losses.value import CheckedLoss, Loss, MeanOverExamples, call, is_elementwise
from stretto.nn.batch import IGNORED, Examples, to_device
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.seeding import PreservedGenerator

FIRST = 4  # made-up outputs are tried on the first minibatches; of later ones on those whose number is a power of two
MOST = 1 << 22  # elements of made-up outputs; of larger ones only some examples of each part are made

PASSED_ON = f"""\
Let the model return its outputs (logits), and compute the loss of them in loss=, torch's cross_entropy or (sum, count);
or cut nothing, microbatches=1 and one replica; {UNLESS}"""

Check = Callable[[Loss, Any, Any], None]  # (loss, output of a part, its target), before its backward


class MeanCheck:
    """Checks a loss on every minibatch that is cut."""

    def __init__(self, loss: Loss) -> None:
        self._trusted = is_trusted(loss)
        self._kinds: set[tuple[Any, ...]] = set()
        self._minibatches = 0

    def due(self, target: Any, sizes: Sequence[int], first: int) -> Check | None:
        """A function to call with the model's output for a part of the minibatch; None if no check is due.

        `sizes` are the examples of each part of the minibatch, `first` those of the output. The function raises
        UsageError if the loss is no mean over examples; call it before the backward.
        """
        number = self._minibatches
        self._minibatches += 1
        if self._trusted or len(sizes) < 2:
            return None
        kind = kind_of(target)
        if kind in self._kinds and number >= FIRST and number & (number - 1):
            return None

        def check(loss: Loss, output: Any, part: Any) -> None:
            refuse_passed_on(loss, output, part, first)
            if isinstance(part, Examples):  # which cannot be marked
                return
            refuse_parts(loss, output, target, sizes, first, mark=kind not in self._kinds)
            self._kinds.add(kind)

        return check

    def neighbours(
        self, targets: Sequence[Any], sizes: Sequence[int], beside: tuple[Sequence[Any], Sequence[int]] | None
    ) -> Neighbours | None:
        """The check of the minibatch that `due` was asked for; None where there is nothing to compare."""
        if self._trusted or (len(targets) < 2 and beside is None):
            return None
        return Neighbours(targets, sizes, self._minibatches, beside)


def is_trusted(loss: Loss) -> bool:
    """Whether a loss is known to be a mean over examples, or to have a sum and a count."""
    means = is_elementwise(loss) and getattr(loss, "reduction", "mean") == "mean"
    return means or isinstance(loss, MeanOverExamples) or hasattr(loss, "sum_and_count")


def sample(target: Any, sizes: Sequence[int], most: int) -> tuple[Any, tuple[int, ...]]:
    """The targets of about `most` examples, at least one from each of two parts, and the examples of each part."""
    if sum(sizes) <= most:
        return target, tuple(sizes)
    parts = min(len(sizes), max(2, most))
    per_part = max(1, most // parts)
    starts = [*itertools.accumulate(sizes, initial=0)]
    slices = [(start, min(size, per_part)) for start, size in zip(starts, sizes[:parts], strict=False)]
    chosen = torch.cat([torch.arange(start, start + size) for start, size in slices])

    def rows_of(leaf: Any) -> Any:
        fits = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == starts[-1]
        return leaf[chosen.to(leaf.device)] if fits else leaf

    return tree_map(rows_of, target), tuple(size for _, size in slices)


def kind_of(target: Any) -> tuple[Any, ...]:
    """The kind of a target: its structure, dtypes, numbers of dimensions, and whether entries are ignored."""
    leaves, structure = tree_flatten(target)
    return (
        structure,
        *((leaf.dtype, leaf.dim(), ignores(leaf)) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves),
    )


def ignores(target: Tensor) -> bool:
    """Whether a class target on the CPU has entries of -100; False on a device, which would have to be waited for."""
    return target.device.type == "cpu" and is_whole(target) and bool((target == IGNORED).any())


@torch.no_grad()
def refuse_passed_on(loss: Loss, output: Any, target: Any, examples: int) -> None:
    """Raise UsageError if the loss depends on an output that has no rows for its examples: the model's own mean."""

    def is_number(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and not (tensor.dim() and tensor.shape[0] % examples == 0)

    detached = map_tensors(Tensor.detach, output)
    if not any(map(is_number, tensors_of(detached))):
        return
    changed = map_tensors(lambda tensor: 2 * tensor + 1 if is_number(tensor) else tensor, detached)
    device = tensors_of(detached)[0].device
    try:
        with PreservedGenerator(device):
            before, after = (call(loss, each, target, counted=False) for each in (detached, changed))
    except FAILURES:
        return
    one, other = (each.total if isinstance(each, Sum) else each for each in (before, after))
    if not torch.equal(one, other):
        remedy = loss.remedy if isinstance(loss, CheckedLoss) else PASSED_ON
        raise UsageError(
            "the loss passes on a number that the model computed of a whole micro-batch: averaged over parts of a "
            "minibatch it would be another loss wherever parts count unevenly (tokens that are not padding, say). "
            f"{remedy}"
        )


def refuse_parts(loss: Loss, output: Any, target: Any, sizes: Sequence[int], first: int, *, mark: bool) -> None:
    """As `refuse_uneven`, on as many of the minibatch's examples as there is room for made-up outputs of."""
    elements = sum(tensor.numel() for tensor in tensors_of(output))
    sampled, sampled_sizes = sample(target, sizes, MOST * first // max(elements, 1))
    refuse_uneven(loss, output, sampled, sampled_sizes, first, mark=mark)


@torch.no_grad()
def refuse_uneven(loss: Loss, output: Any, target: Any, sizes: Sequence[int], first: int, *, mark: bool) -> None:
    """Raise UsageError unless a minibatch's loss is the mean of its parts' losses, weighted by `sizes` in examples.

    `output` is the model's for `first` examples. The check makes up outputs of its shape, and repeats the output itself
    only if the loss takes no others. `mark`: check again with some targets marked as ignored.
    """
    device = next((tensor.device for tensor in tensors_of(output)), torch.device("cpu"))
    target = to_device(target, device)
    made_up_for = f"tried with made-up outputs for its {sum(sizes)} examples"
    with PreservedGenerator(device), preserved_buffers(loss):
        for draw in DRAWS:
            outputs = map_tensors(lambda tensor, draw=draw: made_up(tensor, first, sum(sizes), draw), output)
            comparison = compare(loss, outputs, target, sizes)
            if comparison is not None:
                break
        else:
            return  # the loss takes none of the outputs
        if comparison.differs:
            raise refusal(loss, comparison, f"on this minibatch, {made_up_for}", outputs, target, sizes)
        if not mark:
            return
        cpu = torch.device("cpu")
        marked = map_tensors(lambda tensor: with_ignored(tensor.to(cpu), sizes[0]), target)
        if differs(marked, target):
            on_cpu = map_tensors(lambda tensor: tensor.to(cpu), outputs)
            comparison = compare(loss, on_cpu, marked, sizes)
            if comparison is not None and comparison.differs:  # None: the loss does not take targets of -100
                where = f"where targets of one part are padded with -100, {made_up_for}"
                raise refusal(loss, comparison, where, on_cpu, marked, sizes)


def made_up(leaf: Tensor, examples: int, total: int, draw: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """A made-up output for `total` examples, shaped like `leaf`, the output for `examples`; numbers as they are."""
    if not leaf.dim() or leaf.shape[0] % examples:
        return leaf
    shape = (leaf.shape[0] // examples * total, *leaf.shape[1:])
    return draw(leaf, shape) if leaf.is_floating_point() else repeated(leaf, shape)


def normal(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Normal random values, as logits may be."""
    return torch.randn(shape, dtype=leaf.dtype, device=leaf.device)


def uniform(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform random values from 0.01 to 0.99, as probabilities may be."""
    return torch.rand(shape, dtype=leaf.dtype, device=leaf.device).clamp_(0.01, 0.99)


DRAWS = (normal, uniform, repeated)


def with_ignored(target: Tensor, first: int) -> Tensor:
    """The targets with -100 in all but the first entry of each of the `first` examples.

    Targets with one entry an example are class labels, which are not padded: they stay as they are, unless some are
    -100 already.
    """
    if not is_whole(target) or (target.dim() < 2 and not ignores(target)):
        return target
    marked = target.clone()
    if target.dim() < 2:
        marked[1:first] = IGNORED
    else:
        marked[:first].flatten(1)[:, 1:] = IGNORED
    return marked


def differs(marked: Any, target: Any) -> bool:
    pairs = zip(tensors_of(marked), tensors_of(target), strict=True)
    return any(not torch.equal(one, other.to(one.device)) for one, other in pairs)
