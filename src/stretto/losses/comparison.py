"""The loss of examples together beside what training makes of the losses of their parts.

Compares the loss of two neighbouring parts of a minibatch, joined, with that of the two, in every minibatch.

    micro-batch   0     1     2     3        outputs of the one before are kept until the next has come
    compared        0+1   1+2   2+3          all pairs where outputs are small, else where targets differ most
    replica 1     0                          with several replicas also one part with the next replica's targets

A mean over counted targets is found in the first minibatch with uneven counts in its parts, before the update.
Unevenness comes with targets, so these choose the pairs; outputs are those of training.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.losses.cross_entropy import CrossEntropy, Sum, next_token_cross_entropy, recognise, token_cross_entropy
from stretto.losses.value import CheckedLoss, Loss, call
from stretto.nn.batch import IGNORED, Examples, to_device
from stretto.nn.carried_attributes import Buffers, exchanged
from stretto.nn.input_errors import KINDS
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import FixedDraws, PreservedGenerator

FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)  # of a loss that takes no such tensors
MOST_IGNORED = 3  # classes that a loss may ignore, which are tried
NOISE = 64  # roundings by which two ways of adding up may differ

COUNT = """\
Return a sum and the count it is divided by:
    def loss(output, target):
        {returned}"""
DECLARED = "say so: loss=stretto.mean(loss), or @stretto.mean above the function"
UNLESS = f"or, if you know that it is a mean over the examples of a batch, {DECLARED}"
OF_CROSS_ENTROPY = 'return cross_entropy({}, reduction="sum"), (target != -100).sum()'
OF_OTHERS = "return (error * mask).sum(), mask.sum()  # error: your loss of each entry; mask: the entries that count"
DEPENDS = """\
What it gives for one example depends on the others (as contrastive losses do, and roots or variances of a batch), so
that no parts of a minibatch give it."""
TOGETHER = f"""\
{DEPENDS} Cut nothing: microbatches=1 behind the method, or a method without it, and one
replica; or, if each part is to have the loss of its own examples alone, {DECLARED}"""
CROSS_ENTROPY = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}


class LossComparison:
    """`whole`, the loss of some examples, and `parts`, what training makes of their parts' losses.

    `scale` is the size of the largest number among them, `tolerance` a share of it.
    """

    def __init__(self, whole: float, parts: float, scale: float, tolerance: float) -> None:
        self.whole, self.parts, self._scale, self._tolerance = whole, parts, scale, tolerance

    @property
    def differs(self) -> bool:
        """Whether they differ by more than the tolerance; a part that is no number differs."""
        return self.differs_by(self._tolerance)

    def differs_by(self, share: float) -> bool:
        """Whether they differ by more than this share of the largest."""
        return not abs(self.whole - self.parts) <= share * self._scale


def combined(
    whole: Tensor | Sum, parts: Sequence[Tensor | Sum], sizes: Sequence[int], roundings: float | None
) -> LossComparison | None:
    """A loss's value of examples together beside its values of parts of so many examples.

    `roundings` are the tolerance, in units of the dtype's; None for the root of one. None if the whole is no number,
    or some return sums and others do not.
    """
    kinds = {isinstance(value, Sum) for value in (whole, *parts)}
    if len(kinds) > 1:
        return None
    if isinstance(whole, Sum):
        sums = [part for part in parts if isinstance(part, Sum)]
        counts = float(whole.count), sum(float(part.count) for part in sums)
        value, values = float(whole.total), [float(part.total) for part in sums]
        mean = sum(values) * (counts[0] / counts[1] if counts[1] else 1.0)  # a count that does not add up differs, too
        dtype = whole.total.dtype
    else:
        values = [float(part) for part in parts if isinstance(part, Tensor)]
        value, dtype = float(whole), whole.dtype
        mean = sum(part * size for part, size in zip(values, sizes, strict=True)) / sum(sizes)
    if not isfinite(value):
        return None
    rounding = torch.finfo(dtype).eps
    tolerance = rounding**0.5 if roundings is None else roundings * rounding
    return LossComparison(value, mean, max(map(abs, (value, *values))), tolerance)


def isfinite(value: float) -> bool:
    """Whether it is a number, and not infinite."""
    return abs(value) < float("inf")


def compare(loss: Loss, output: Any, target: Any, sizes: Sequence[int]) -> LossComparison | None:
    """The loss of these examples beside what training makes of its values for their parts, of `sizes` examples each.

    None if the loss fails on such outputs or targets, or returns no number. Random numbers are the same in all calls.
    """
    total, start, parts = sum(sizes), 0, []

    def value(output: Any, target: Any) -> Tensor | Sum:
        with python_generators_restored(), FixedDraws():
            return call(loss, output, target, counted=False)

    try:
        whole = value(output, target)
        for size in sizes:
            part_of = partial(rows, start=start, size=size, total=total)
            parts.append(value(map_tensors(part_of, output), map_tensors(part_of, target)))
            start += size
    except FAILURES:
        return None  # if the loss fails on the real output too, its call on that raises
    return combined(whole, parts, sizes, None)


def in_float64(loss: Loss, output: Any, target: Any, sizes: Sequence[int]) -> LossComparison | None:
    """As `compare`, with everything in float64; None if the loss does not take that."""
    doubled = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    return compare(doubled, map_tensors(double, output), map_tensors(double, target), sizes)


def double(tensor: Tensor) -> Tensor:
    """A floating-point tensor in float64, others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def rows(tensor: Tensor, start: int, size: int, total: int) -> Tensor:
    """The rows of `size` examples from example `start` on; a tensor without rows for all `total` examples as it is."""
    if not tensor.dim() or tensor.shape[0] % total:
        return tensor
    times = tensor.shape[0] // total
    return tensor[start * times : (start + size) * times]


def refusal(
    loss: Loss, comparison: LossComparison, where: str, output: Any, target: Any, sizes: Sequence[int]
) -> UsageError:
    """The error for a loss whose comparison differs, with the remedy that fits it; on these outputs and targets."""
    if isinstance(loss, CheckedLoss):
        remedy = loss.remedy
    elif needs_all(loss, output, target, sizes):
        remedy = TOGETHER
    else:
        counted = COUNT.format(returned=counted_line(loss, output, target))
        remedy = f"Averaged over parts of a minibatch, it would be another loss. {counted}\n{UNLESS}"
    return UsageError(
        f"the loss is not a mean over examples: {where}, it is {comparison.whole:.6g}, but its values for their "
        f"{len(sizes)} parts (micro-batches and replicas) come to {comparison.parts:.6g}. {remedy}"
    )


def counted_line(loss: Loss, output: Any, target: Any) -> str:
    """The line of code with which this loss returns a sum and a count."""
    if not is_cross_entropy(loss, target) or not isinstance(output, Tensor):
        return OF_OTHERS
    if target.dim() < 2 or output.shape[:-1] != target.shape:
        return OF_CROSS_ENTROPY.format("output, target")
    for name, known in (("", token_cross_entropy), ("next_", next_token_cross_entropy)):
        if output.dim() == 3 and are_alike(loss, known, output, target):
            own = f"stretto.losses.{name}token_cross_entropy"
            itself = f"loss={own}, or --loss {name}token_cross_entropy"
            return f"return {own}.sum_and_count(output, target)  # or give it itself: {itself}"
    return OF_CROSS_ENTROPY.format("output.flatten(0, -2), target.flatten()")


def as_cross_entropy(loss: Loss, output: Tensor, target: Any) -> CrossEntropy | None:
    """The cross entropy that has this loss's gradient by the output, whatever its code; None if there is none.

    Which class it ignores is read off that gradient.
    """
    if not may_be_cross_entropy(loss, target) or not output.is_floating_point():
        return None
    gradient = gradient_by(loss, output, target)
    if gradient is None:
        return None
    silent = target[~gradient.any(-1)] if gradient.shape[:-1] == target.shape else target[:0]
    ignored = [IGNORED, *silent.unique()[:MOST_IGNORED].tolist()]
    forms = [CrossEntropy(ignore_index=each, tokens=None) for each in ignored]
    forms += [replace(form, shift=True, tokens=True) for form in forms if output.dim() == 3]
    return next((form for form in forms if are_alike(loss, form, output, target)), None)


def may_be_cross_entropy(loss: Loss, target: Any) -> bool:
    """Whether `as_cross_entropy` may find one: the targets are classes, and the loss is not torch's own already."""
    return is_whole(target) and recognise(loss) is None


def gradient_by(loss: Loss, output: Tensor, target: Tensor) -> Tensor | None:
    """The gradient of a loss, or of its mean, by the output, in float64; None where it fails on a copy of that."""
    try:
        with torch.enable_grad():
            leaf = output.detach().clone().requires_grad_()
            value = call(loss, leaf, target, counted=False)
            return torch.autograd.grad(value.mean if isinstance(value, Sum) else value, leaf)[0].double()
    except (*KINDS, UsageError):
        return None


def are_alike(loss: Loss, other: Loss, output: Tensor, target: Tensor) -> bool:
    """Whether two losses, or their means, have the same gradient by the output; False where one fails on it."""
    one, two = (gradient_by(each, output, target.long()) for each in (loss, other))
    if one is None or two is None:
        return False
    return bool((one - two).norm() <= max(1e-3, 4 * torch.finfo(output.dtype).eps) * two.norm())


def needs_all(loss: Loss, output: Any, target: Any, sizes: Sequence[int]) -> bool:
    """Whether the loss of the first part's examples depends on the other examples, beyond how many of them count.

    With a mean over counted targets, each example's gradient depends on the example alone, but for a common factor from
    the targets.
    """
    examples, length = sum(sizes), sizes[0]

    def others_changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or tensor.shape[0] % examples:
            return tensor
        same = len(tensor) // examples * length
        return torch.cat([tensor[:same], (tensor + tensor.roll(1, 0))[same:] / 2])

    def gradient(output: Any, target: Any) -> Tensor:
        leaves = [tensor.requires_grad_() for tensor in tensors_of(output) if tensor.is_floating_point()]
        value = call(loss, output, target, counted=False)
        total = value.total if isinstance(value, Sum) else value
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return torch.cat([rows(each, 0, length, examples).flatten() for each in found if each is not None])

    try:
        with torch.enable_grad():
            before = gradient(map_tensors(Tensor.clone, output), target)
            after = gradient(map_tensors(lambda tensor: others_changed(tensor).clone(), output), target)
            if not torch.allclose(before, after, rtol=1e-3, equal_nan=True):
                return True
            after = gradient(map_tensors(Tensor.clone, output), map_tensors(others_changed, target))
            return not torch.allclose(before / before.norm(), after / after.norm(), rtol=1e-3, equal_nan=True)
    except FAILURES:
        return False


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


def is_whole(target: Any) -> bool:
    """Whether it is a tensor of integers wide enough for -100."""
    return isinstance(target, Tensor) and target.dtype in (torch.int64, torch.int32, torch.int16)


def repeated(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows of a tensor, repeated until there are shape[0], or the first of them."""
    return torch.cat([tensor] * -(-shape[0] // len(tensor)))[: shape[0]]


def preserved_buffers(loss: Loss) -> AbstractContextManager[None]:
    """The context in which a loss that is a module may be called without changing its buffers."""
    return exchanged(Buffers([loss] if isinstance(loss, nn.Module) else []).snapshot())


SMALL = 1 << 14  # elements of a micro-batch's outputs: up to so many, all pairs are compared


class Part:
    """A part of a minibatch: its output, its target, its number of examples, and its loss where that is known."""

    def __init__(self, output: Any, target: Any, size: int, value: Tensor | Sum | None = None) -> None:
        self.output, self.target, self.size, self.value = output, target, size, value


class Neighbours:
    """The micro-batches of one minibatch in one replica; `check` is called with each, in order, before its backward.

    `targets` and `sizes` are those of all of them. `beside` are those of the next replica, if gradients are added over
    replicas. `number` is that of the minibatch.
    """

    def __init__(
        self,
        targets: Sequence[Any],
        sizes: Sequence[int],
        number: int,
        beside: tuple[Sequence[Any], Sequence[int]] | None = None,
    ) -> None:
        self._targets, self._sizes = targets, sizes
        self._number = number
        self._beside = beside
        self._kept: Part | None = None
        self._chosen: frozenset[int] = frozenset()  # the later micro-batch of each pair

    def check(self, loss: Loss, microbatch: int, output: Any, value: Tensor | Sum) -> None:
        """Raise UsageError if the loss is found to be no mean over examples. `output` and `value` are a micro-batch's.

        Does nothing where the loss does not take what is joined.
        """
        with torch.no_grad():
            detached = map_tensors(Tensor.detach, output)
            device = next((tensor.device for tensor in tensors_of(detached)), torch.device("cpu"))
            if microbatch == 0:
                self._chosen = self._choose(detached, device)
            target = to_device(self._targets[microbatch], device)
            part = Part(detached, target, self._sizes[microbatch], value)
            if microbatch in self._chosen and self._kept is not None:
                compare_joined(loss, self._kept, part, f"on micro-batches {microbatch - 1} and {microbatch}")
            if microbatch == 0 and self._beside is not None:
                targets, sizes = self._beside
                compare_with(loss, part, targets[0], sizes[0], device, "on parts of two replicas")
            if device.type == "cpu" and len(self._targets) > 1 and not is_finite(value):
                other = microbatch - 1 if microbatch else 1
                where = f"on micro-batches {min(microbatch, other)} and {max(microbatch, other)}"
                compare_with(loss, part, self._targets[other], self._sizes[other], device, where)
            self._kept = part if microbatch + 1 in self._chosen else None

    def _choose(self, output: Any, device: torch.device) -> frozenset[int]:
        pairs = range(1, len(self._targets))
        if not pairs:
            return frozenset()
        if device.type == "cpu" and sum(tensor.numel() for tensor in tensors_of(output)) <= SMALL:
            return frozenset(pairs)
        return most_different(self._targets) or frozenset({1 + self._number % len(pairs)})


def is_finite(value: Tensor | Sum) -> bool:
    """Whether a loss is a number: a part without counted targets may have NaN where the whole has none."""
    return bool((value.total if isinstance(value, Sum) else value).isfinite())


def compare_with(loss: Loss, part: Part, target: Any, size: int, device: torch.device, where: str) -> None:
    """As `compare_joined`, with another part whose outputs are not here: those of this one take their place."""
    if 0 in (part.size, size):
        return
    output = map_tensors(lambda tensor: resized(tensor, part.size, size), part.output)
    compare_joined(loss, part, Part(output, to_device(target, device), size), where)


def compare_joined(loss: Loss, one: Part, other: Part, where: str) -> None:
    """Raise UsageError unless the loss of two parts together is what training makes of the two.

    A difference larger than rounding is looked at again in float64, where the loss takes that, and with random numbers
    that are the same for all examples.
    """
    sizes = (one.size, other.size)
    device = next((tensor.device for tensor in tensors_of(one.output)), torch.device("cpu"))
    with PreservedGenerator(device), python_generators_restored(), preserved_buffers(loss):
        try:
            output = map_tensors(lambda former, latter: joined(former, latter, sizes), one.output, other.output)
            target = joined_targets(one.target, other.target)
            whole = call(loss, output, target, counted=False)
            values = [
                call(loss, part.output, part.target, counted=False) if part.value is None else part.value
                for part in (one, other)
            ]
        except FAILURES as error:
            if isinstance(error, UsageError):
                raise
            return
        comparison = combined(whole, values, sizes, NOISE)
        if comparison is None or not comparison.differs:
            return
        comparison = (
            in_float64(loss, output, target, sizes)
            or compare(loss, output, target, sizes)
            or combined(whole, values, sizes, None)
        )
        if comparison is not None and comparison.differs:
            raise refusal(loss, comparison, where, output, target, sizes)


def joined_targets(one: Any, other: Any) -> Any:
    """The targets of two parts behind each other."""
    if isinstance(one, Examples):
        return one.joined(other)
    return map_tensors(lambda *both: torch.cat(both) if both[0].dim() else both[0], one, other)


def joined(one: Tensor, other: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Two parts of an output behind each other; the first of them where they have no rows for so many examples."""
    has_rows = one.dim() and one.shape[0] * sizes[1] == other.shape[0] * sizes[0] and not one.shape[0] % sizes[0]
    return torch.cat((one, other)) if has_rows else one


def resized(tensor: Tensor, examples: int, wanted: int) -> Tensor:
    """The rows of `examples` as those of so many as `wanted`; a tensor without rows for them as it is."""
    if not tensor.dim() or tensor.shape[0] % examples or examples == wanted:
        return tensor
    return repeated(tensor, (tensor.shape[0] // examples * wanted,))


def most_different(targets: Sequence[Any]) -> frozenset[int]:
    """For each mark that losses ignore, the pair of neighbours, by the later one, whose targets differ most in it.

    Marks are missing entries (nan), lowest, highest and zero ones. None where all are alike, or on a device that would
    have to be waited for.
    """
    chosen = set()
    for leaves in zip(*map(tensors_of, targets), strict=True):
        for shares in shares_of_marks(leaves) if leaves[0].device.type == "cpu" else ():
            differences = [abs(one - other) for one, other in pairwise(shares)]
            if max(differences):
                chosen.add(1 + differences.index(max(differences)))
    return frozenset(chosen)


def shares_of_marks(leaves: Sequence[Tensor]) -> list[list[float]]:
    """The share of marked entries in each tensor: of nan, or of the lowest and the highest in them all, and of 0."""

    def shares(marked: Sequence[Tensor]) -> list[float]:
        return [float(entries.sum()) / max(entries.numel(), 1) for entries in marked]

    if leaves[0].is_floating_point() or leaves[0].is_complex():
        return [shares([leaf.isnan() for leaf in leaves]), shares([leaf == 0 for leaf in leaves])]
    present = [leaf for leaf in leaves if leaf.numel()]
    if not present:
        return []
    low, high = min(int(leaf.min()) for leaf in present), max(int(leaf.max()) for leaf in present)
    return [shares([leaf == mark for leaf in leaves]) for mark in dict.fromkeys((low, high, 0))]
