"""Whether a loss is a mean over examples, so that a minibatch may be cut into parts: found out with the loss alone.

A mean over tokens that count, or one with class weights, is not. The loss of made-up outputs on the minibatch's real
targets is compared with the sum of its parts' losses, each times its share of the examples; and once more with targets
of which some are marked as ignored, as padding of later minibatches may be.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from stretto.errors import UsageError
from stretto.losses.sums import Sum
from stretto.losses.value import Loss, MeanOverExamples, call
from stretto.nn.batch import IGNORED
from stretto.nn.seeding import PreservedGenerator

FIRST = 4  # minibatches that are looked at in any case; after them each whose number is a power of two
MOST = 1 << 22  # numbers of made-up outputs: of large ones some examples of each part are enough

REMEDY = """\
Its parts cannot make up for that: training would follow another loss. Return a sum and what it is divided by:
    def loss(output, target):
        return cross_entropy(output, target, reduction="sum"), (target != -100).sum()
or, if you know that it is a mean over the examples of a batch, say so: loss=stretto.mean(loss)"""


class MeanCheck:
    """Looks at a loss on the first minibatches, on ever fewer later ones, and on targets of a new kind."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._trusted = isinstance(loss, MeanOverExamples) or hasattr(loss, "sum_and_count")
        self._kinds: set[tuple[Any, ...]] = set()
        self._minibatches = 0

    def due(self, target: Any, sizes: Sequence[int], first: int) -> Callable[[Any], None] | None:
        """What to call with the output of a part of a minibatch, of `first` examples; None for nothing.

        `sizes` are those of all its parts, in examples. It raises UsageError for a loss that is no mean over examples,
        before it is differentiated.
        """
        number = self._minibatches
        self._minibatches += 1
        if self._trusted or len(sizes) < 2:
            return None
        kind = kind_of(target)
        if kind in self._kinds and number >= FIRST and number & (number - 1):
            return None

        def check(output: Any) -> None:
            numbers = sum(leaf.numel() for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor))
            some, own = sample(target, sizes, MOST * first // max(numbers, 1))
            refuse_uneven(self._loss, output, some, own, first, written_in=kind not in self._kinds)
            self._kinds.add(kind)

        return check


def sample(target: Any, sizes: Sequence[int], most: int) -> tuple[Any, tuple[int, ...]]:
    """About `most` of the examples, at least one of each of two parts: their targets, and how many of each part."""
    if sum(sizes) <= most:
        return target, tuple(sizes)
    parts = min(len(sizes), max(2, most))
    each = max(1, most // parts)
    starts = [*itertools.accumulate(sizes, initial=0)]
    own = [(start, min(size, each)) for start, size in zip(starts, sizes[:parts], strict=False)]
    chosen = torch.cat([torch.arange(start, start + size) for start, size in own])

    def rows_of(leaf: Any) -> Any:
        fits = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == starts[-1]
        return leaf[chosen.to(leaf.device)] if fits else leaf

    return tree_map(rows_of, target), tuple(size for _, size in own)


def kind_of(target: Any) -> tuple[Any, ...]:
    """Targets of one kind are of the same types and numbers of dimensions, and all or none have ignored entries."""
    leaves, structure = tree_flatten(target)
    return (
        structure,
        *((leaf.dtype, leaf.dim(), ignores(leaf)) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves),
    )


def ignores(target: Tensor) -> bool:
    """Whether some of it is marked as ignored; a device is not waited for."""
    return target.device.type == "cpu" and is_whole(target) and bool((target == IGNORED).any())


def is_whole(target: Any) -> bool:
    """Whether it is a tensor of whole numbers, wide enough for the mark of what is ignored."""
    return isinstance(target, Tensor) and target.dtype in (torch.int64, torch.int32, torch.int16)


@torch.no_grad()
def refuse_uneven(loss: Loss, output: Any, target: Any, sizes: Sequence[int], first: int, *, written_in: bool) -> None:
    """Raise UsageError unless a minibatch's loss is the mean of its parts', weighted by their `sizes` in examples.

    `output` is that of `first` examples; its numbers are not used unless the loss takes no others.
    """
    device = next((leaf.device for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)), torch.device("cpu"))
    with PreservedGenerator(device):
        for draw in DRAWS:
            made = tree_map(lambda leaf, draw=draw: like_all(leaf, first, sum(sizes), draw), output)
            seen = differing(loss, made, target, sizes)
            if seen is not None:
                break
        else:
            return  # it takes no output but the model's own
        seen.refuse("on this minibatch")
        if not written_in:
            return
        cpu = torch.device("cpu")
        marked = tree_map(
            lambda leaf: with_ignored(leaf.to(cpu), sizes[0]) if isinstance(leaf, Tensor) else leaf, target
        )
        if marked_differs(marked, target):
            outputs = tree_map(lambda leaf: leaf.to(cpu) if isinstance(leaf, Tensor) else leaf, made)
            seen = differing(loss, outputs, marked, sizes)
            if seen is not None:  # else -100 means nothing to it
                seen.refuse("where targets of one part are padded with -100")


class Comparison:
    """The loss of a whole minibatch, and the mean of its parts' losses."""

    def __init__(self, whole: float, parts: float, tolerance: float, sizes: Sequence[int]) -> None:
        self.whole, self.parts, self.tolerance, self.sizes = whole, parts, tolerance, sizes

    def refuse(self, where: str) -> None:
        """Raise UsageError if they differ."""
        if abs(self.whole - self.parts) <= self.tolerance * max(abs(self.whole), abs(self.parts)):
            return
        raise UsageError(
            f"the loss is not a mean over examples: {where}, tried with made-up outputs for its {sum(self.sizes)} "
            f"examples, it is {self.whole:.6g}, and the mean of its {len(self.sizes)} parts' losses (micro-batches and "
            f"replicas) is {self.parts:.6g}. {REMEDY}"
        )


def differing(loss: Loss, output: Any, target: Any, sizes: Sequence[int]) -> Comparison | None:
    """Both losses; None if it does not take such outputs or targets, gives sums, or no number."""
    total, start, mean = sum(sizes), 0, 0.0
    try:
        whole = call(loss, output, target, counted=False)
        if isinstance(whole, Sum):
            return None
        for size in sizes:
            own = [tree_map(lambda leaf: rows(leaf, start, size, total), each) for each in (output, target)]  # noqa: B023
            part = call(loss, *own, counted=False)
            mean += float(part if isinstance(part, Tensor) else part.mean) * size / total
            start += size
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None  # what it says of the real output is said when it gets it
    value = float(whole)
    if not all(map(torch.isfinite, (torch.tensor(value), torch.tensor(mean)))):
        return None
    return Comparison(value, mean, torch.finfo(whole.dtype).eps ** 0.5, sizes)


def like_all(leaf: Any, examples: int, total: int, draw: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Any:
    """Made-up outputs for `total` examples, from a tensor that is the output of some."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] % examples:
        return leaf
    shape = (leaf.shape[0] // examples * total, *leaf.shape[1:])
    return draw(leaf, shape) if leaf.is_floating_point() else repeated(leaf, shape)


def repeated(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows there are, again and again."""
    return torch.cat([leaf] * -(-shape[0] // len(leaf)))[: shape[0]]


def normal(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of any size, as logits are."""
    return torch.randn(shape, dtype=leaf.dtype, device=leaf.device)


def uniform(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Between 0 and 1, as probabilities are."""
    return torch.rand(shape, dtype=leaf.dtype, device=leaf.device).clamp_(0.01, 0.99)


DRAWS = (normal, uniform, repeated)


def rows(leaf: Any, start: int, size: int, total: int) -> Any:
    """The rows of some of the examples."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] % total:
        return leaf
    times = leaf.shape[0] // total
    return leaf[start * times : (start + size) * times]


def with_ignored(target: Tensor, first: int) -> Tensor:
    """Targets with all but the first entry of each example of the first part marked as ignored.

    Left alone where an example has one target, unless some are marked already: classes are not padded.
    """
    if not is_whole(target) or (target.dim() < 2 and not ignores(target)):
        return target
    marked = target.clone()
    if target.dim() < 2:
        marked[1:first] = IGNORED
    else:
        marked[:first].flatten(1)[:, 1:] = IGNORED
    return marked


def marked_differs(marked: Any, target: Any) -> bool:
    """Whether anything has been marked."""
    pairs = zip(tree_flatten(marked)[0], tree_flatten(target)[0], strict=True)
    return any(isinstance(one, Tensor) and not torch.equal(one, other.to(one.device)) for one, other in pairs)
