"""Checks that a loss is a mean over examples, which allows cutting a minibatch into parts, by calling the loss.

A mean over tokens that are not ignored, or one with class weights, is no mean over examples. The check compares the
loss of made-up outputs on the minibatch's real targets with the sum of its parts' losses, each times the part's share
of the examples. It repeats this with some targets marked as ignored, as padding in later minibatches may be.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from stretto.errors import UsageError
from stretto.losses.sums import Sum
from stretto.losses.value import Loss, MeanOverExamples, call
from stretto.nn.batch import IGNORED
from stretto.nn.seeding import PreservedGenerator

FIRST = 4  # the first minibatches are all checked; of later ones those whose number is a power of two
MOST = 1 << 22  # elements of made-up outputs; of larger ones only some examples of each part are made

REMEDY = """\
Averaged over parts of a minibatch, it would be another loss. Return a sum and the count it is divided by:
    def loss(output, target):
        {returned}
or, if you know that it is a mean over the examples of a batch, say so: loss=stretto.mean(loss)"""

OF_CROSS_ENTROPY = 'return cross_entropy(output, target, reduction="sum"), (target != -100).sum()'
OF_OTHERS = "return (error * mask).sum(), mask.sum()  # error: your loss of each entry; mask: the entries that count"
CROSS_ENTROPY = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}


class MeanCheck:
    """Checks a loss on the first minibatches, on ever fewer later ones, and on every new kind of target."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._trusted = isinstance(loss, MeanOverExamples) or hasattr(loss, "sum_and_count")
        self._kinds: set[tuple[Any, ...]] = set()
        self._minibatches = 0

    def due(self, target: Any, sizes: Sequence[int], first: int) -> Callable[[Any], None] | None:
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

        def check(output: Any) -> None:
            elements = sum(leaf.numel() for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor))
            sampled, sampled_sizes = sample(target, sizes, MOST * first // max(elements, 1))
            refuse_uneven(self._loss, output, sampled, sampled_sizes, first, mark=kind not in self._kinds)
            self._kinds.add(kind)

        return check


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


def is_whole(target: Any) -> bool:
    """Whether it is a tensor of integers wide enough for -100."""
    return isinstance(target, Tensor) and target.dtype in (torch.int64, torch.int32, torch.int16)


@torch.no_grad()
def refuse_uneven(loss: Loss, output: Any, target: Any, sizes: Sequence[int], first: int, *, mark: bool) -> None:
    """Raise UsageError unless a minibatch's loss is the mean of its parts' losses, weighted by `sizes` in examples.

    `output` is the model's for `first` examples. The check makes up outputs of its shape, and repeats the output itself
    only if the loss takes no others. `mark`: check again with some targets marked as ignored.
    """
    device = next((leaf.device for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)), torch.device("cpu"))
    with PreservedGenerator(device):
        for draw in DRAWS:
            outputs = tree_map(lambda leaf, draw=draw: made_up(leaf, first, sum(sizes), draw), output)
            comparison = compare(loss, outputs, target, sizes)
            if comparison is not None:
                break
        else:
            return  # nothing to compare: the loss returns sums, or takes none of the outputs
        remedy = REMEDY.format(returned=OF_CROSS_ENTROPY if is_cross_entropy(loss, target) else OF_OTHERS)
        comparison.refuse("on this minibatch", remedy)
        if not mark:
            return
        cpu = torch.device("cpu")
        marked = tree_map(
            lambda leaf: with_ignored(leaf.to(cpu), sizes[0]) if isinstance(leaf, Tensor) else leaf, target
        )
        if differs(marked, target):
            on_cpu = tree_map(lambda leaf: leaf.to(cpu) if isinstance(leaf, Tensor) else leaf, outputs)
            comparison = compare(loss, on_cpu, marked, sizes)
            if comparison is not None:  # None: the loss does not take targets of -100
                comparison.refuse("where targets of one part are padded with -100", remedy)


def is_cross_entropy(loss: Any, target: Any) -> bool:
    """Whether a loss names a cross entropy in its code, and the target is a tensor of classes."""
    while isinstance(loss, partial):
        loss = loss.func
    modules = loss.modules() if isinstance(loss, nn.Module) else ()
    function = type(loss).forward if isinstance(loss, nn.Module) else loss
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    used = {*names, *(type(module).__name__ for module in modules)}
    used |= {type(getattr(function, "__globals__", {}).get(name)).__name__ for name in names}  # criterion(output, y)
    return is_whole(target) and not used.isdisjoint(CROSS_ENTROPY)


class MeanComparison:
    """The loss of a whole minibatch, and the mean of its parts' losses."""

    def __init__(self, whole: float, parts: float, tolerance: float, sizes: Sequence[int]) -> None:
        self.whole, self.parts, self.tolerance, self.sizes = whole, parts, tolerance, sizes

    def refuse(self, where: str, remedy: str) -> None:
        """Raise UsageError with the remedy if the two differ by more than the tolerance, a share of the larger one."""
        if abs(self.whole - self.parts) <= self.tolerance * max(abs(self.whole), abs(self.parts)):
            return
        raise UsageError(
            f"the loss is not a mean over examples: {where}, tried with made-up outputs for its {sum(self.sizes)} "
            f"examples, it is {self.whole:.6g}, but the mean of its {len(self.sizes)} parts' losses (micro-batches and "
            f"replicas) is {self.parts:.6g}. {remedy}"
        )


def compare(loss: Loss, output: Any, target: Any, sizes: Sequence[int]) -> MeanComparison | None:
    """The loss of the minibatch beside the mean of its parts'.

    None if the loss fails on such outputs or targets, returns sums, or returns no finite number.
    """
    total, start, mean = sum(sizes), 0, 0.0
    try:
        whole = call(loss, output, target, counted=False)
        if isinstance(whole, Sum):
            return None
        for size in sizes:
            part_of = partial(rows, start=start, size=size, total=total)
            part = call(loss, tree_map(part_of, output), tree_map(part_of, target), counted=False)
            mean += float(part if isinstance(part, Tensor) else part.mean) * size / total
            start += size
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None  # if the loss fails on the real output too, its call on that raises
    value = float(whole)
    if not all(map(torch.isfinite, (torch.tensor(value), torch.tensor(mean)))):
        return None
    return MeanComparison(value, mean, torch.finfo(whole.dtype).eps ** 0.5, sizes)


def made_up(leaf: Any, examples: int, total: int, draw: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Any:
    """A made-up output for `total` examples, shaped like `leaf`, the output for `examples`; other leaves unchanged."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] % examples:
        return leaf
    shape = (leaf.shape[0] // examples * total, *leaf.shape[1:])
    return draw(leaf, shape) if leaf.is_floating_point() else repeated(leaf, shape)


def repeated(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows of `leaf`, repeated until there are shape[0]."""
    return torch.cat([leaf] * -(-shape[0] // len(leaf)))[: shape[0]]


def normal(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Normal random values, as logits may be."""
    return torch.randn(shape, dtype=leaf.dtype, device=leaf.device)


def uniform(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform random values from 0.01 to 0.99, as probabilities may be."""
    return torch.rand(shape, dtype=leaf.dtype, device=leaf.device).clamp_(0.01, 0.99)


DRAWS = (normal, uniform, repeated)


def rows(leaf: Any, start: int, size: int, total: int) -> Any:
    """The rows of `size` examples from example `start` on; a leaf without rows for all `total` examples as it is."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] % total:
        return leaf
    times = leaf.shape[0] // total
    return leaf[start * times : (start + size) * times]


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
    """Whether any entry of the targets has been marked."""
    pairs = zip(tree_flatten(marked)[0], tree_flatten(target)[0], strict=True)
    return any(isinstance(one, Tensor) and not torch.equal(one, other.to(one.device)) for one, other in pairs)
