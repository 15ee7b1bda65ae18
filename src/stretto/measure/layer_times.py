"""What the layers of a model take on this machine: medians of repeats in which layers and batch sizes take turns."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stretto.cost.layer_table import Affine, Measured, ModelCosts
from stretto.errors import UsageError
from stretto.measure.nonnegative_fit import fit
from stretto.measure.traced_layers import Loss
from stretto.nn import deferred
from stretto.nn.nested import map_tensors, with_tensors
from stretto.nn.preserve import device_of, output_tensors, undisturbed
from stretto.nn.stopwatch import as_leaves, timed
from stretto.optim.parameter_labels import labelled_by
from stretto.runtime.process_memory import keep_memory

Inputs = tuple[Tensor, ...]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
T = TypeVar("T")
REPEATS = 7
AGAIN = "B again"  # a whole backward that finds gradients of another micro-batch to add its own to
Samples = dict[tuple[int, str, int], list[float]]  # (layer, pass, examples) -> seconds


class Timed(NamedTuple):
    """A layer that is measured, what it trains, and the step of its optimizer, if there is one."""

    module: nn.Module
    trained: list[nn.Parameter]
    step: Callable[[], object] | None


class Run(NamedTuple):
    """What a forward of a layer leaves for its backward."""

    number: int
    layer: Timed
    leaves: Inputs
    outputs: Inputs


def with_times(
    costs: ModelCosts,
    layers: Sequence[nn.Module],
    examples: Sequence[Tensor | Inputs],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    targets: Sequence[Tensor] = (),
    optimizer: MakeOptimizer | None = None,
    repeats: int = REPEATS,
    crowded: bool = False,
) -> ModelCosts:
    """The costs with measured seconds of each layer, `t0 + b t1` through `examples` of several batch sizes.

    Measured as training runs them, one layer after the other on what the one before gave: forward, whole backward,
    another one that adds to its gradients, both halves, a step of the optimizer if one is given; and the loss, if it is
    given with a target for each of the examples. On a copy, in training mode: nothing is trained. The process keeps its
    memory from here on, as one that trains does. `crowded` says that as many processes of the machine as will train
    measure at the same time: no contention is then added to these times. Raises UsageError for fewer than two batch
    sizes.
    """
    batches = [x if isinstance(x, tuple) else (x,) for x in examples]
    sizes = sorted({batch[0].shape[0] for batch in batches})
    if len(sizes) < 2 or sizes[0] < 1:
        raise UsageError(f"examples of the batch sizes {sizes}: a line takes two different ones, of 1 example or more")
    if loss is not None and len(targets) != len(batches):
        raise UsageError(f"{len(targets)} targets for {len(batches)} examples: give one for each, or no loss")
    keep_memory()
    samples: Samples = defaultdict(list)
    device = device_of(layers)
    modules = deferred.deep_copy(list(layers))
    optimizer = None if optimizer is None else labelled_by(optimizer, modules)
    copies = [prepared(layer, optimizer) for layer in modules]
    with undisturbed([layer.module for layer in copies], device), torch.enable_grad():
        for layer in copies:
            layer.module.train()
        for turn in range(1 + repeats):
            for number, inputs in enumerate(batches):
                ends = []
                if loss is not None:
                    target = map_tensors(lambda tensor: tensor.to(device), targets[number])
                    ends = [Timed(Loss(loss, target), [], None)]
                sweep([*copies, *ends], tuple(x.to(device) for x in inputs), samples if turn else defaultdict(list))
        together = [] if optimizer is None else whole_steps(copies, optimizer, repeats)
    start, step = starting(samples), 0.0 if optimizer is None else stepping(optimizer, samples)
    as_one_step(samples, together, step)
    number = len(copies) + (loss is not None)
    rows = [
        replace(row, measured=replace(measured(index, samples, sizes, updates=optimizer is not None), crowded=crowded))
        if index < number
        else row
        for index, row in enumerate(costs.layers)
    ]
    return replace(costs, layers=tuple(rows), start=start, step=step)


def prepared(module: nn.Module, optimizer: MakeOptimizer | None) -> Timed:
    """A layer ready to be measured. Its optimizer steps by nothing, so that numbers stay what they are."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if optimizer is None or not trained:
        return Timed(module, trained, None)
    made = optimizer(trained)
    for group in made.param_groups:
        group["lr"] = 0.0
    return Timed(module, trained, made.step)


def starting(samples: Samples) -> float:
    """Seconds of starting a backward; takes them off the samples of layers: a stage starts one for all its layers."""
    leaf = torch.zeros(1, requires_grad=True)
    start = median_seconds(partial(torch.autograd.grad, leaf * 1, leaf, retain_graph=True))
    take_off(samples, ("B", "I", "W", AGAIN), start)
    return start


def stepping(optimizer: MakeOptimizer, samples: Samples) -> float:
    """Seconds of starting a step of the optimizer, taken off the samples likewise: one number's, less what more add."""
    one, five = (median_seconds(small_step(optimizer, number)) for number in (1, 5))
    step = max(0.0, one - (five - one) / 4)
    take_off(samples, ("U",), step)
    return step


def whole_steps(layers: Sequence[Timed], optimizer: MakeOptimizer, repeats: int) -> list[float]:
    """Seconds of steps of one optimizer of all layers, as a stage has it."""
    trained = list(dict.fromkeys(parameter for layer in layers for parameter in layer.trained))
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    whole = prepared(nn.ParameterList(trained), optimizer)
    samples: list[float] = []
    for _ in range(2 + repeats):
        if whole.step is not None:
            sample(whole.step, device_of([layer.module for layer in layers]), samples)
    drop_gradients(layers)
    return samples[2:]


def as_one_step(samples: Samples, together: Sequence[float], step: float) -> None:
    """Scale the samples of steps, of which each layer has one of its own, to what they take in one of all layers."""
    sizes = {examples for _, kind, examples in samples if kind == "U"}
    if not together or not sizes:
        return
    apart = statistics.fmean(
        sum(statistics.median(own) for (_, kind, examples), own in samples.items() if kind == "U" and examples == size)
        for size in sizes
    )
    share = min(1.0, max(0.0, statistics.median(together) - step) / apart) if apart else 1.0
    for (_, kind, _), own in samples.items():
        if kind == "U":
            own[:] = [seconds * share for seconds in own]


def small_step(optimizer: MakeOptimizer, number: int) -> Callable[[], object]:
    """A step on so many parameters of one number each."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    made: Callable[[], object] = optimizer(parameters).step
    return made


def median_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call on the CPU: the median of some, after two that warm up."""
    samples: list[float] = []
    for _ in range(2 + 3 * REPEATS):
        sample(call, torch.device("cpu"), samples)
    return statistics.median(samples[2:])


def take_off(samples: Samples, kinds: Sequence[str], start: float) -> None:
    """Subtract from the samples of these kinds what any call takes; a tenth of each sample stays at least."""
    for (_, kind, _), taken in samples.items():
        if kind in kinds:
            taken[:] = [max(seconds - start, seconds / 10) for seconds in taken]


def sweep(layers: Sequence[Timed], inputs: Inputs, samples: Samples) -> None:
    """Time two micro-batches and the update that they make, and a third whose backward comes in halves."""
    examples = inputs[0].shape[0]

    def into(index: int, kind: str) -> list[float]:
        return samples[index, kind, examples]

    for kind in ("B", AGAIN):
        runs = forwards(layers, inputs, into)
        gradients: Sequence[Tensor | None] = [None] * len(runs[-1].outputs)
        while runs:
            run = runs.pop()  # its graph goes when the next one comes
            gradients = backward(run, gradients, into(run.number, kind))
    for index, layer in enumerate(layers):
        if layer.step is not None:
            sample(layer.step, inputs[0].device, into(index, "U"))
    drop_gradients(layers)
    runs = forwards(layers, inputs, into)
    for kind in ("I", "W"):
        for run in reversed(runs):
            half(run, kind, into(run.number, kind))
    drop_gradients(layers)


def drop_gradients(layers: Sequence[Timed]) -> None:
    """Set all gradients to None, as after an update."""
    for layer in layers:
        for parameter in layer.trained:
            parameter.grad = None


def forwards(layers: Sequence[Timed], inputs: Inputs, into: Callable[[int, str], list[float]]) -> list[Run]:
    """Time a forward of every layer."""
    runs, tensors, output = [], inputs, None
    for index, layer in enumerate(layers):
        leaves = as_leaves(tensors, first=index == 0)
        given = (with_tensors(output, leaves),) if isinstance(layer.module, Loss) else leaves
        output = sample(partial(layer.module, *given), leaves[0].device, into(index, "F"))
        outputs = output_tensors(output)
        runs.append(Run(index, layer, leaves, outputs))
        tensors = tuple(tensor.detach() for tensor in outputs)
    return runs


def backward(run: Run, arrived: Sequence[Tensor | None], samples: list[float]) -> list[Tensor | None]:
    """Time the whole backward of a layer, for the gradients of its outputs; the gradients of its inputs."""
    pairs = [
        (root, torch.ones_like(root) if gradient is None else gradient)
        for root, gradient in zip(run.outputs, arrived, strict=True)
        if root.requires_grad
    ]
    if pairs and (run.layer.trained or any(leaf.requires_grad for leaf in run.leaves)):
        roots, gradients = (list(each) for each in zip(*pairs, strict=True))
        sample(partial(torch.autograd.backward, roots, gradients), roots[0].device, samples)
    return [leaf.grad for leaf in run.leaves]


def half(run: Run, kind: str, samples: list[float]) -> None:
    """Time one half of the backward of a layer, if it has any."""
    roots = [tensor for tensor in run.outputs if tensor.requires_grad]
    wanted = run.layer.trained if kind == "W" else [leaf for leaf in run.leaves if leaf.requires_grad]
    if roots and wanted:
        gradients = [torch.ones_like(root) for root in roots]
        call = partial(torch.autograd.backward, roots, gradients, inputs=wanted, retain_graph=kind == "I")
        sample(call, roots[0].device, samples)


def sample(call: Callable[[], T], device: torch.device, samples: list[float]) -> T:
    """What a call returns; its seconds are added to the samples."""
    result, nanoseconds = timed(call, device)
    samples.append(nanoseconds / 1e9)
    return result


def measured(index: int, samples: Samples, sizes: Sequence[int], *, updates: bool) -> Measured:
    """The lines of one layer, and what does not depend on the batch."""
    lines, residuals = {}, [0.0]
    for kind in ("F", "B", "I", "W"):
        points = [(size, statistics.median(samples[index, kind, size])) for size in sizes if samples[index, kind, size]]
        lines[kind], residual = affine(points)
        residuals.append(residual)
    steps = [seconds for size in sizes for seconds in samples[index, "U", size]] or [0.0]
    longer = [
        again - once
        for size in sizes
        for again, once in zip(samples[index, AGAIN, size], samples[index, "B", size], strict=True)
    ]
    forward, backward, inputs, weights = (lines[kind] for kind in "FBIW")
    return Measured(
        forward,
        backward,
        inputs,
        weights,
        update=statistics.median(steps) if updates else None,
        accumulate=max(0.0, statistics.median(longer)) if longer else 0.0,
        residual=max(residuals),
    )


def affine(points: Sequence[tuple[float, float]]) -> tuple[Affine, float]:
    """t0 + b t1 through (b, t), neither negative, and its residual."""
    if not points:
        return Affine(), 0.0
    line = fit([(1, size) for size, _ in points], [seconds for _, seconds in points])
    return Affine(*line.rates), line.residual
