"""What each piece of a model costs: forward FLOPs, measured seconds, or parameters."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.nn.flop_counter import counting
from stretto.nn.preserve import home, members, undisturbed
from stretto.nn.shapes import describe
from stretto.nn.stopwatch import as_leaves, timed
from stretto.nn.stopwatch import attempt as attempt_layer

Inputs = tuple[Tensor, ...]
REPEATS = 5


@dataclass(frozen=True)
class PieceCosts:
    """One whole number a piece (FLOPs, nanoseconds or parameters), how to print it, and how it was obtained.

    `known`: they are what was asked for, and not something that stands for it.
    """

    values: list[int]
    show: Callable[[int], str]
    how: str
    known: bool = True

    def together(self, bounds: Sequence[int]) -> "PieceCosts":
        """The costs of runs of pieces: entry s is that of the pieces bounds[s] up to bounds[s + 1]."""
        sums = [sum(self.values[start:stop]) for start, stop in pairwise(bounds)]
        return replace(self, values=sums)


def measure(pieces: Sequence[nn.Module], names: Sequence[str], inputs: Inputs | None, by: str) -> PieceCosts:
    """What the pieces, run one after the other on `inputs`, cost each; never all 0."""
    if by == "parameters":
        return parameters(pieces, "number of parameters")
    if inputs is None:
        return stand_in(pieces, "number of parameters (to count FLOPs, give one input batch, example=x)")
    if by == "time":
        values = seconds(pieces, names, inputs)
        return PieceCosts(
            values,
            lambda cost: f"{cost / 1e6:.3f} ms",
            f"measured forward and backward of the example, {describe(inputs)}, median of {REPEATS}",
        )
    values = flops(pieces, names, inputs)
    if not any(values):
        return stand_in(pieces, "number of parameters (the example's forward has no FLOPs that torch counts)")
    return PieceCosts(values, show_flops, f"forward FLOPs counted on the example, {describe(inputs)}")


def parameters(pieces: Sequence[nn.Module], how: str) -> PieceCosts:
    """Numbers of parameters; 1 each where there are none at all."""
    values = [sum(p.numel() for p in piece.parameters()) for piece in pieces]
    if not any(values):
        return PieceCosts([1] * len(values), str, f"1 each, for all would cost 0; asked for: {how}", known=False)
    return PieceCosts(values, lambda cost: f"{cost:,}", how)


def stand_in(pieces: Sequence[nn.Module], how: str) -> PieceCosts:
    """Numbers of parameters, for want of FLOPs."""
    return replace(parameters(pieces, how), known=False)


def flops(pieces: Sequence[nn.Module], names: Sequence[str], inputs: Inputs) -> list[int]:
    """Forward FLOPs as torch counts them on the real modules (a multiplication and an addition are two).

    Element-wise work, norms and look-ups count nothing.
    """
    counted: list[int] = []
    tensors = inputs
    with undisturbed(pieces, home(pieces)), torch.no_grad():
        for piece, name in zip(pieces, names, strict=True):
            with counting() as counter:
                tensors = members(attempt(piece, name, tensors))
            counted.append(counter.get_total_flops())
    return counted


def seconds(pieces: Sequence[nn.Module], names: Sequence[str], inputs: Inputs) -> list[int]:
    """Nanoseconds of forward and backward in training mode: the median of a few sweeps over all pieces."""
    device = home(pieces)
    samples: list[list[int]] = [[] for _ in pieces]
    with undisturbed(pieces, device), torch.enable_grad():
        for piece in pieces:
            piece.train()
        for _ in range(1 + REPEATS):
            tensors = inputs
            for index, (piece, name) in enumerate(zip(pieces, names, strict=True)):
                leaves = as_leaves(tensors, first=index == 0)
                outputs, nanoseconds = timed(partial(forward_and_backward, piece, name, leaves), device)
                tensors = tuple(tensor.detach() for tensor in outputs)
                samples[index].append(nanoseconds)
    return [round(statistics.median(sample[1:])) for sample in samples]  # the first sweep warms up


def forward_and_backward(piece: nn.Module, name: str, leaves: Inputs) -> Inputs:
    """The outputs of one forward, with its backward done; no parameter's `.grad` is touched."""
    wanted = [tensor for tensor in (*piece.parameters(), *leaves) if tensor.requires_grad]
    outputs = members(attempt(piece, name, leaves))
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
    return outputs


def attempt(piece: nn.Module, name: str, arguments: Sequence[Any]) -> Any:
    """Call a piece. Raises UsageError, naming it and what reached it, if it fails."""
    remedy = "Mend the layer, or the one before it, or give an example of the shape and type that the model takes"
    return attempt_layer(piece, name, arguments, remedy)


def show_flops(cost: int) -> str:
    """1234567 as 1.23 MFLOP."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if cost >= 10**power:
            return f"{cost / 10**power:,.2f} {prefix}FLOP"
    return f"{cost} FLOP"
