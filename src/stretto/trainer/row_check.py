"""Whether what a network computes for an example depends on the other examples of its batch.

Then parts of a minibatch (micro-batches, replicas) are not trained as a plain loop trains the whole of it: attention
over the batch for want of batch_first, gradients divided by how often a token is in the batch. Batch norms are told
apart, by a warning.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.errors import UsageError
from stretto.nn.batch import as_tuple, call, with_names_of
from stretto.nn.nested import tensors_of
from stretto.nn.preserve import UnrestoredError, device_of, undisturbed, unique, without_fused_transformers
from stretto.nn.seeding import FixedDraws
from stretto.nn.sharded_modules import is_sharded

MOST = 4  # examples of each of two parts
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}  # of the largest element
NOISE = 1e-2  # what rounding may leave of a gradient that is zero, over the tolerance times the largest gradient
FEW = 1024  # elements of each gradient that are compared
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class RowCheck:
    """Looks once, before the first minibatch that is cut, in the process that has the inputs."""

    def __init__(self, stages: Sequence[object], parts: int) -> None:
        """`stages` are all stages, of which a process may know only some; a minibatch is cut into so many `parts`."""
        modules = [stage for stage in stages if isinstance(stage, nn.Module)]
        known = parts > 1 and len(modules) == len(stages)
        self._modules = modules if known and all(map(may_run, unique(modules))) else []

    def check(self, loads: Sequence[Mapping[str, Any]]) -> None:
        """Raise UsageError if the outputs or gradients of one part's examples change with another part beside it."""
        modules, self._modules = self._modules, []
        if not modules or len(loads) < 2 or not loads[0]["activation"] or not loads[1]["activation"]:
            return
        try:
            what = coupled(modules, loads[0]["activation"], loads[1]["activation"])
        except UnrestoredError:  # weights that the look itself has changed
            raise
        except Exception:  # noqa: BLE001 (a network that takes no other number of rows cannot be judged)
            return
        if what is not None:
            raise UsageError(
                f"{what} of some examples depends on the other examples of their batch (attention over the batch for "
                "want of batch_first=True, an embedding's scale_grad_by_freq, a mean over rows): of parts of a "
                "minibatch training would be another one. Cut nothing: microbatches=1 behind the method, or a method "
                "without it, and one replica"
            )


def may_run(module: nn.Module) -> bool:
    """Whether a module can be run once more on the side: neither shared out, nor compiled, nor a norm of each batch."""
    norm_of_batch = isinstance(module, _BatchNorm) and module.running_mean is None
    compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    return not (norm_of_batch or is_sharded(module) or compiled)


def coupled(modules: Sequence[nn.Module], one: Sequence[Tensor], other: Sequence[Tensor]) -> str | None:
    """What of the examples of `one` is otherwise with those of `other` behind them; None if nothing is."""
    rows = min(MOST, one[0].shape[0]), min(MOST, other[0].shape[0])
    few = [
        [x[:number] if x.dim() and x.shape[0] == part[0].shape[0] else x for x in part]
        for part, number in zip((one, other), rows, strict=True)
    ]
    cut = [x.dim() > 0 and x.shape[0] == rows[0] for x in few[0]]
    both = [torch.cat([x, y]) if is_cut else x for x, y, is_cut in zip(*few, cut, strict=True)]
    alone, gradients = run(modules, with_names_of(one, few[0]), None)
    beside, others = run(modules, with_names_of(one, both), alone)
    for mine, theirs in zip(alone, beside, strict=True):
        if theirs.shape[0] * rows[0] != mine.shape[0] * sum(rows) or theirs.shape[1:] != mine.shape[1:]:
            return None
        if not close(mine, theirs[: len(mine)]):
            return "the output"
    pairs = [(a, b) for a, b in zip(gradients, others, strict=True) if a is not None and b is not None]
    floor = NOISE * max((largest(a) for a, _ in pairs), default=0.0)
    return None if all(close(a, b, floor) for a, b in pairs) else "the gradient"


def run(
    modules: Sequence[nn.Module], inputs: tuple[Tensor, ...], first: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The floating-point outputs, and gradients for a fixed cotangent of those rows that are in `first`, too.

    Of each gradient some elements at equal distances.
    """
    parameters = [p for p in nn.ModuleList(modules).parameters() if p.requires_grad]
    with (
        undisturbed(modules, device_of(modules)),
        unhooked(modules),
        FixedDraws(),
        without_fused_transformers(),
        torch.enable_grad(),
    ):
        before = states()
        output: Any = call(modules[0], inputs)
        for module in modules[1:]:
            output = module(*as_tuple(output))
        if states() != before:
            raise RuntimeError("the network draws random numbers otherwise than from torch")
        outputs = [each for each in tensors_of(output) if each.is_floating_point() and each.dim()]
        wanted = [each for each in outputs if each.requires_grad]
        sizes = [len(each) for each in (outputs if first is None else first)]
        cotangents = [cotangent(each, sizes[i]) for i, each in enumerate(outputs) if each.requires_grad]
        found = torch.autograd.grad(wanted, parameters, cotangents, allow_unused=True) if wanted else ()
    return [each.detach() for each in outputs], [None if each is None else some(each) for each in found]


def states() -> tuple[object, str]:
    """Of the generators whose numbers are others where a batch is larger."""
    return random.getstate(), str(np.random.get_state())


def some(gradient: Tensor) -> Tensor:
    """Elements of a gradient at equal distances, and its norm: the gradient itself is freed, as before a step."""
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    few = gradient.flatten()[:: max(1, -(-gradient.numel() // FEW))].clone()
    return torch.cat([few, torch.linalg.vector_norm(gradient).reshape(1)])


def cotangent(output: Tensor, rows: int) -> Tensor:
    """A fixed random gradient for the first rows of an output, nothing for the others."""
    drawn = torch.randn((rows, *output.shape[1:]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = torch.zeros_like(output)
    made[:rows] = drawn.to(output)
    return made


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def close(one: Tensor, other: Tensor, floor: float = 0.0) -> bool:
    """Whether two tensors are equal but for rounding, relative to the largest element or, if more, to `floor`."""
    size = max(largest(one), floor)
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE.get(one.dtype, 0.1) * size, equal_nan=True)


@contextmanager
def unhooked(modules: Sequence[nn.Module]) -> Iterator[None]:
    """In this block hooks of modules are not called: they may collect what goes by."""
    kept = [(vars(module), name, vars(module)[name]) for module in unique(modules) for name in HOOKS]
    for attributes, name, _ in kept:
        attributes[name] = OrderedDict()
    try:
        yield
    finally:
        for attributes, name, hooks in kept:
            attributes[name] = hooks
