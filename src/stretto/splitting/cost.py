"""The cost of each piece of a model: forward FLOPs, measured seconds, or the number of parameters."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.nn import deferred
from stretto.nn.flop_counter import counting
from stretto.nn.preserve import device_of, output_tensors, undisturbed
from stretto.nn.shapes import describe
from stretto.nn.stopwatch import as_leaves, timed
from stretto.nn.stopwatch import attempt as attempt_layer

Inputs = tuple[Tensor, ...]
REPEATS = 5


@dataclass(frozen=True)
class PieceCosts:
    """One whole number a piece (FLOPs, nanoseconds or parameters), how to print it, and how it was obtained.

    `known` is False where another measure stands in for the one asked for.
    """

    values: list[int]
    show: Callable[[int], str]
    how: str
    known: bool = True

    def together(self, bounds: Sequence[int]) -> "PieceCosts":
        """The costs of stages: entry s sums the pieces bounds[s] up to bounds[s + 1]."""
        sums = [sum(self.values[start:stop]) for start, stop in pairwise(bounds)]
        return replace(self, values=sums)


def measure(pieces: Sequence[nn.Module], names: Sequence[str], inputs: Inputs | None, by: str) -> PieceCosts:
    """The cost of each piece, run one after the other on `inputs`, by "flops", "time" or "parameters". Never all 0."""
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
    """The number of parameters of each piece; 1 for each piece if none has parameters."""
    values = [sum(p.numel() for p in piece.parameters()) for piece in pieces]
    if not any(values):
        return PieceCosts([1] * len(values), str, f"1 each, as every piece would cost 0; asked for: {how}", known=False)
    return PieceCosts(values, lambda cost: f"{cost:,}", how)


def stand_in(pieces: Sequence[nn.Module], how: str) -> PieceCosts:
    """The number of parameters of each piece, in place of FLOPs."""
    return replace(parameters(pieces, how), known=False)


def flops(pieces: Sequence[nn.Module], names: Sequence[str], inputs: Inputs) -> list[int]:
    """Forward FLOPs as torch counts them on the real modules (a multiplication and an addition are two).

    Element-wise operations, norms and embeddings count 0.
    """
    counted: list[int] = []
    tensors = inputs
    with undisturbed(pieces, device_of(pieces)), torch.no_grad(), deferred.faked(pieces):
        for piece, name in zip(pieces, names, strict=True):
            with counting() as counter:
                tensors = output_tensors(attempt(piece, name, tensors))
            counted.append(counter.get_total_flops())
    return counted


def seconds(pieces: Sequence[nn.Module], names: Sequence[str], inputs: Inputs) -> list[int]:
    """Nanoseconds of each piece's forward and backward in training mode: the median of REPEATS runs of all pieces."""
    device = device_of(pieces)
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
    return [round(statistics.median(sample[1:])) for sample in samples]  # the first run warms up


def forward_and_backward(piece: nn.Module, name: str, leaves: Inputs) -> Inputs:
    """The outputs of one forward, with its backward done; no parameter's `.grad` is touched."""
    differentiable = [tensor for tensor in (*piece.parameters(), *leaves) if tensor.requires_grad]
    outputs = output_tensors(attempt(piece, name, leaves))
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if roots and differentiable:
        torch.autograd.grad(roots, differentiable, [torch.ones_like(root) for root in roots], allow_unused=True)
    return outputs


def attempt(piece: nn.Module, name: str, arguments: Sequence[Any]) -> Any:
    """Call a piece. If it fails, raises UsageError with its name and the shapes of its arguments."""
    remedy = "Mend the layer, or the one before it, or give an example of the shape and type that the model takes"
    return attempt_layer(piece, name, arguments, remedy)


def show_flops(cost: int) -> str:
    """1234567 as 1.23 MFLOP."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if cost >= 10**power:
            return f"{cost / 10**power:,.2f} {prefix}FLOP"
    return f"{cost} FLOP"
