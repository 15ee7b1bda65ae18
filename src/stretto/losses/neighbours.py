"""Compares the loss of two neighbouring parts of a minibatch, joined, with that of the two, in every minibatch.

    micro-batch   0     1     2     3        outputs of the one before are kept until the next has come
    compared        0+1   1+2   2+3          all pairs where outputs are small, else those whose targets differ most
    replica 1     0                          with several replicas also one part with the next replica's targets

A mean over what counts is found in the minibatch in which its parts first count unevenly, before its update: this
comes with targets, so pairs are chosen by these, and the outputs are those that are trained on.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.losses.comparison import (
    FAILURES,
    NOISE,
    combined,
    compare,
    in_float64,
    preserved_buffers,
    refusal,
    repeated,
)  # fmt: skip
from stretto.losses.sums import Sum
from stretto.losses.value import Loss, call
from stretto.nn.batch import Examples, to_device
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import PreservedGenerator

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
    """Whether a loss is a number: that of a part of which nothing counts may be none, and that of the whole is one."""
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
