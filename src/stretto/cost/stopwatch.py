"""What the layers of a model take on this machine: medians of repeats in which layers and batch sizes take turns."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from stretto.cost.table import Affine, Measured, ModelCosts
from stretto.errors import UsageError
from stretto.fitting import fit
from stretto.splitting.undisturbed import home, members, undisturbed

Inputs = tuple[Tensor, ...]
T = TypeVar("T")
REPEATS = 7
Samples = dict[tuple[int, str, int], list[float]]  # (layer, pass, examples) -> seconds


def with_times(
    costs: ModelCosts,
    layers: Sequence[nn.Module],
    examples: Sequence[Tensor | Inputs],
    *,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    repeats: int = REPEATS,
) -> ModelCosts:
    """The costs with measured seconds of each layer, `t0 + b t1` through `examples` of several batch sizes.

    Forward, whole backward and both halves, in training mode; and steps of the optimizer on a copy, if one is given.
    Nothing is trained. Raises UsageError for fewer than two batch sizes. A row behind the layers, the loss, is left.
    """
    given = [each if isinstance(each, tuple) else (each,) for each in examples]
    sizes = sorted({each[0].shape[0] for each in given})
    if len(sizes) < 2 or sizes[0] < 1:
        raise UsageError(f"examples of the batch sizes {sizes}: a line takes two different ones, of 1 example or more")
    samples: Samples = defaultdict(list)
    device = home(layers)
    with undisturbed(layers, device), torch.enable_grad():
        for module in layers:
            module.train()
        for turn in range(1 + repeats):
            for inputs in given:
                sweep(layers, tuple(x.to(device) for x in inputs), samples if turn else defaultdict(list))
    rows = [
        replace(row, measured=measured(index, samples, sizes, layers, optimizer)) if index < len(layers) else row
        for index, row in enumerate(costs.layers)
    ]
    return replace(costs, layers=tuple(rows))


def sweep(layers: Sequence[nn.Module], inputs: Inputs, samples: Samples) -> None:
    """Time all passes of each layer, one after the other."""
    examples = inputs[0].shape[0]
    for index, layer in enumerate(layers):
        leaves = tuple(t.detach().requires_grad_(index > 0 and t.is_floating_point()) for t in inputs)
        outputs = members(timed(partial(layer, *leaves), samples[index, "F", examples]))
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        trained = [p for p in layer.parameters() if p.requires_grad]
        below = [leaf for leaf in leaves if leaf.requires_grad]
        for kind, wanted in (("I", below), ("W", trained), ("B", [*trained, *below])):
            if roots and wanted:
                backward = partial(torch.autograd.grad, roots, wanted, gradients, retain_graph=True, allow_unused=True)
                timed(backward, samples[index, kind, examples])
        inputs = tuple(tensor.detach() for tensor in outputs)


def timed(call: Callable[[], T], samples: list[float]) -> T:
    """Add the seconds of a call to its samples; gives what it gave."""
    synchronize()
    begin = time.perf_counter()
    made = call()
    synchronize()
    samples.append(time.perf_counter() - begin)
    return made


def synchronize() -> None:
    """Wait for what a GPU has been given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(
    index: int,
    samples: Samples,
    sizes: Sequence[int],
    layers: Sequence[nn.Module],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
) -> Measured:
    """The lines of one layer."""
    lines, residuals = {}, [0.0]
    for kind in ("F", "B", "I", "W"):
        points = [(size, statistics.median(samples[index, kind, size])) for size in sizes if samples[index, kind, size]]
        lines[kind], residual = line(points)
        residuals.append(residual)
    update = None if optimizer is None else update_of(layers[index], optimizer)
    return Measured(lines["F"], lines["B"], lines["I"], lines["W"], update, max(residuals))


def line(points: Sequence[tuple[float, float]]) -> tuple[Affine, float]:
    """t0 + b t1 through (b, t), neither negative, and its residual."""
    if not points:
        return Affine(), 0.0
    found = fit([(1, size) for size, _ in points], [seconds for _, seconds in points])
    return Affine(*found.rates), found.residual


def update_of(layer: nn.Module, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """The median of some steps of an optimizer on copies of a layer's parameters."""
    copies = [nn.Parameter(p.detach().clone()) for p in layer.parameters() if p.requires_grad]
    if not copies:
        return 0.0
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    made = optimizer(copies)
    samples: list[float] = []
    for _ in range(2 + REPEATS):
        timed(made.step, samples)
    return statistics.median(samples[2:])
