"""The parts that a gradient is a sum of: of each part of the batch, and of each use of a weight.

Forwards and backwards run under a `Condition`; what is added up of them, and how, costs nothing more. So most mistakes
are sums of what two or three conditions come to.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from stretto.analysis.diagnosis.step import ROUNDING, TrainingStep
from stretto.errors import UsageError
from stretto.losses.cross_entropy import Sum
from stretto.losses.value import understand, value_function
from stretto.nn.batch import call, with_names_of
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.preserve import without_fused_transformers
from stretto.options.user_errors import explained
from stretto.splitting.proof import as_before, seed_all

MOST = 1 << 16  # elements of a parameter's gradient that are kept: half of them at equal distances, half the largest
TOTAL = 1 << 23  # about so many elements of all parameters, at least LEAST of each
LEAST = 1 << 12
UNTOLD = 1 << 16  # stands for the uses of a weight by what is no call of torch that takes it
USES = 3  # calls of torch that take a weight and are told apart; later ones count as the last of these


@dataclass(frozen=True)
class Condition:
    """What forwards and backwards are computed with; by default as in a plain step.

    `earlier`: parameters that have the earlier weights, or one use of them, as "name#0"; `present`: the backward has
    the present ones all the same. `by_part`: each part's forward sees no other part, else one forward takes the whole
    batch, and each part has a backward; `whole`: so has the whole batch. `change`: the name of a change of the target,
    the loss or the model, which `changes` of the passes knows. `dtype`: of autocast. `seed`: of dropout.
    """

    earlier: frozenset[str] = frozenset()
    present: bool = False
    by_part: bool = False
    whole: bool = False
    change: str = ""
    dtype: torch.dtype | None = None
    seed: int = 0


class ImpossibleChangeError(Exception):
    """A mistake that cannot be made here: the loss or the model fails with what it changes."""


@dataclass(frozen=True, eq=False)
class Contributions:
    """What each part of the batch contributes to a gradient, and its share of what the loss is a mean over.

    `values[name]` is [parts, uses, elements]: some elements of a parameter's gradient. `squares[name]` is the squared
    length of all elements over that of those kept, so that lengths can be told. `count`: what the loss is a mean over.
    """

    values: Mapping[str, Tensor]
    shares: Tensor
    count: float
    squares: Mapping[str, float]


class SeparateUses(TorchFunctionMode):
    """Gives every call of torch that takes a parameter a leaf of its own: each use of a weight has its own gradient.

    Of each gradient, what `take` makes of it is kept in `rows` as soon as it is there: no two need room at a time. It
    is written into `room`: small tensors among whole gradients would keep the memory of these from being used again.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        take: Callable[[str, Tensor], Tensor],
        room: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in parameters.items() if not p._backward_hooks}
        self._parameters = parameters
        self._values = {**parameters, **values}
        self._take, self._room = take, room
        self.leaves: dict[str, list[Tensor]] = {name: [] for name in parameters}
        self.rows: dict[str, dict[int, Tensor]] = {name: {} for name in parameters}  # by use; UNTOLD last
        self.squares: dict[str, Tensor] = {}
        self.in_float32 = False  # whether some tensor was
        self._hooks: list[Any] = []

    def __enter__(self) -> "SeparateUses":
        for name, parameter in self._parameters.items():
            hook = partial(self._accumulated, name, UNTOLD)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, requires_grad: no use
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._leaf, (tuple(args), dict(kwargs or {})))
        made = func(*args, **kwargs)
        self.in_float32 |= isinstance(made, Tensor) and made.dtype is torch.float32
        return made

    def _leaf(self, value: Any) -> Any:
        name = self._names.get(id(value)) if isinstance(value, nn.Parameter) else None
        if name is None:
            return value
        leaves = self.leaves[name]
        if len(leaves) < USES:
            value = self._values.get(f"{name}#{len(leaves)}", self._values[name])
            leaf = value.detach().clone() if value is not self._parameters[name] else value.detach()
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(self._accumulated, name, len(leaves)))
            leaves.append(leaf)
        return leaves[-1]

    def use_present(self) -> None:
        """From here on, in the backward, all weights are the present ones, whichever the forward had."""
        for name, leaves in self.leaves.items():
            for leaf in leaves:
                if leaf.data_ptr() != self._parameters[name].data_ptr():
                    leaf.data.copy_(self._parameters[name].data)  # unseen by autograd, as in a trainer that does so

    def _accumulated(self, name: str, use: int, leaf: Tensor) -> None:
        gradient = dense(leaf.grad)
        leaf.grad = None
        row, square = self._take(name, gradient), torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        rows = self.rows[name]
        if use in rows:  # a recomputed part may come in several backwards
            rows[use] += row
        else:
            rows[use] = self._room[name].copy_(row) if use == 0 else row.clone()
        self.squares[name] = self.squares.get(name, 0.0) + square


class GradientPasses:
    """Contributions by condition, each computed when it is first asked for.

    `changes` gives a context and a target for a `Condition.change`. `important` are gradients whose largest elements
    are kept, where not all are.
    """

    def __init__(
        self, step: TrainingStep, changes: "Mapping[str, Change]", important: Mapping[str, Tensor | None]
    ) -> None:
        self.step = step
        self.changes = changes
        most = min(MOST, max(LEAST, TOTAL // len(step.parameters)))
        self.kept = {name: kept_elements(p, important.get(name), most) for name, p in step.parameters.items()}
        self._known: dict[Condition, Contributions] = {}
        self._room = {
            name: torch.empty(self.size(name), dtype=torch.float64 if p.dtype is torch.float64 else torch.float32)
            for name, p in step.parameters.items()
        }
        self._loss = value_function(understand(step.loss))
        self.random = False  # whether a forward draws random numbers
        self.in_float32 = False  # whether some tensor of a forward is, even where all weights are float64
        self.unused = set(step.parameters)  # parameters that no pass has given a gradient
        self.decomposes = True  # whether the loss is a mean over what its parts have

    def size(self, name: str) -> int:
        """How many elements of a gradient are kept."""
        kept = self.kept[name]
        return self.step.parameters[name].numel() if kept is None else len(kept)

    def weight(self, name: str) -> Tensor:
        """The kept elements of a parameter."""
        return take(self.step.parameters[name].detach(), self.kept[name])

    def __getitem__(self, condition: Condition) -> Contributions:
        """Raises ImpossibleChangeError where the loss or the model does not take the condition's change."""
        if condition not in self._known:
            try:
                self._known[condition] = self._compute(condition)
            except UsageError as error:
                if condition.change or condition.earlier:
                    raise ImpossibleChangeError(str(error)) from error
                raise
        return self._known[condition]

    def outputs(self, parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """The tensors of the model's output, for parts of the batch joined, without gradients."""
        found = []
        with keeping_mode(self.step.model), torch.no_grad(), without_fused_transformers():
            for part in parts:
                seed_all(0)
                found.append(tensors_of(self._output(part)))
        return [
            torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors) for tensors in zip(*found, strict=True)
        ]

    def activations(self, names: Sequence[str], parts: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        """What each module first returns, the first tensor of it, for parts of the batch joined; in their order."""
        found: dict[str, dict[int, Tensor]] = {}
        modules = dict(self.step.model.named_modules())
        number = 0

        def keep(name: str, _: nn.Module, __: Any, output: Any) -> None:
            found.setdefault(name, {}).setdefault(number, next(iter(tensors_of(output))).detach().clone())

        with keeping_mode(self.step.model), torch.no_grad(), without_fused_transformers(), ExitStack() as hooks:
            for name in names:
                hooks.callback(modules[name].register_forward_hook(partial(keep, name)).remove)
            for number, part in enumerate(parts):
                seed_all(number)
                self._output(part)
        return {name: torch.cat([*rows.values()]) for name, rows in found.items()}

    def _output(self, inputs: tuple[Tensor, ...]) -> Any:
        """What the loss takes: the model's output, of a ModelOutput its logits."""
        before = torch.get_rng_state()
        with explained("diagnose: on this batch the model raised"):
            output = call(self.step.model, fresh(inputs))
        self.random |= not torch.equal(before, torch.get_rng_state())
        return output["logits"] if hasattr(output, "to_tuple") and "logits" in output else output

    def _compute(self, condition: Condition) -> Contributions:
        step = self.step
        change = self.changes[condition.change](step) if condition.change else Changed(step.inputs, step.target)
        targets = step.parts_of(change.target)
        inputs = step.parts_of(change.inputs)
        loss = self._loss if change.loss is None else value_function(change.loss)
        values = {name: step.earlier[name.partition("#")[0]] for name in condition.earlier}
        collected: list[dict[str, Tensor]] = []
        counts: list[float] = []
        seen: list[Any] = []
        for number, part in enumerate(inputs if condition.by_part else [change.inputs]):
            separate = SeparateUses(step.parameters, values, self._take, self._room)
            with keeping_mode(self.step.model), change.context(), separate as uses:
                seed_all(condition.seed + number)
                with torch.enable_grad(), without_fused_transformers(), autocast(condition.dtype):
                    output = self._output(part)
                    wholes = targets[number : number + 1] if condition.by_part else targets
                    if condition.whole:
                        wholes = [change.target]
                    outputs = [output] if len(wholes) == 1 else step.parts_of(output)
                    with explained("diagnose: on this batch the loss raised"):
                        losses = [mean_of(loss, each, target) for each, target in zip(outputs, wholes, strict=True)]
                if condition.present:
                    uses.use_present()
                for left, (mean, count) in zip(range(len(losses))[::-1], losses, strict=True):
                    mean.backward(retain_graph=left > 0)  # type: ignore[no-untyped-call]
                    collected.append(self._collect(uses))
                    counts.append(count)
                self.in_float32 |= uses.in_float32
                seen += [map_tensors(Tensor.detach, each) for each in outputs]
        count = sum(counts)
        shares = [each / (count or 1.0) for each in counts]
        if math.isnan(count):
            shares, count = self._shares(loss, seen, targets, change.target), 1.0
        for part, share in zip(collected, shares, strict=True):
            part |= {name: part[name] * share for name in step.parameters}
        stacked = {name: stack([part[name] for part in collected]) for name in step.parameters}
        squares = {
            name: sum(share**2 * float(part["|" + name]) for part, share in zip(collected, shares, strict=True))
            for name in step.parameters
        }
        kept = {name: float(value.double().square().sum()) for name, value in stacked.items()}
        ratios = {name: squares[name] / kept[name] if kept[name] else 1.0 for name in kept}
        return Contributions(stacked, torch.tensor(shares, dtype=torch.float64), count, ratios)

    def _shares(
        self, loss: Callable[..., Any], outputs: Sequence[Any], targets: Sequence[Any], whole: Any
    ) -> list[float]:
        """What each part counts in the mean over the whole batch: read off the loss's gradients in outputs.

        `decomposes` becomes False for a loss that is no mean over anything that parts have.
        """
        if len(outputs) == 1:
            return [1.0]
        leaves = [map_tensors(as_leaf, output) for output in outputs]
        with torch.enable_grad():
            joined = map_tensors(lambda *each: torch.cat(each) if each[0].dim() else torch.stack(each).mean(), *leaves)
            value, _ = mean_of(loss, joined, whole)
            inputs = [tensors_of(leaf) for leaf in leaves]
            together = gradients_of(value, inputs)
            apart = [
                gradients_of(mean_of(loss, *pair)[0], [own])[0]
                for *pair, own in zip(leaves, targets, inputs, strict=True)
            ]
        shares = []
        close = max(1e-3, 2 * ROUNDING.get(self.step.dtype, 0.0))
        for one, other in zip(together, apart, strict=True):
            own = float(other @ other)
            share = float(one @ other) / own if own else 0.0
            self.decomposes &= float((one - share * other).norm()) <= close * max(float(one.norm()), 1e-12)
            shares.append(share)
        return shares

    def _collect(self, uses: SeparateUses) -> dict[str, Tensor]:
        """The kept elements of the gradients that came, and the squared length of all; then none."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.step.parameters.items():
            rows = [row for _, row in sorted(uses.rows[name].items())]
            self.unused -= {name} if rows else set()
            found[name] = torch.stack(rows) if rows else torch.zeros(0, len(take(parameter.detach(), self.kept[name])))
            found["|" + name] = uses.squares.pop(name, torch.zeros(()))
            uses.rows[name].clear()
        return found

    def _take(self, name: str, gradient: Tensor) -> Tensor:
        return take(gradient, self.kept[name])


@dataclass(frozen=True, eq=False)
class Changed:
    """A batch, a loss and a context in which a mistake is made."""

    inputs: tuple[Tensor, ...]
    target: Any
    loss: Any = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


Change = Callable[[TrainingStep], Changed]


@contextmanager
def keeping_mode(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is as before; in the block its modules train, or evaluate, as they do now."""
    modes = [(module, module.training) for module in model.modules()]
    with as_before([model], list(model.parameters())):
        for module, training in modes:
            module.training = training
        yield


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def fresh(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return with_names_of(inputs, [x.clone() for x in inputs])


def mean_of(loss: Callable[..., Tensor | Sum], output: Any, target: Any) -> tuple[Tensor, float]:
    """The mean of a part's losses, and what it is a mean over; nan if the loss does not say."""
    value = loss(output, target, counted=True)
    return (value.mean, float(value.count)) if isinstance(value, Sum) else (value, math.nan)


def as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def gradients_of(value: Tensor, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The gradients in several groups of tensors, each group's as one vector."""
    flat = [tensor for group in inputs for tensor in group if tensor.requires_grad]
    found = iter(torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True))
    return [torch.cat([next(found).flatten().double() for tensor in group if tensor.requires_grad]) for group in inputs]


def kept_elements(parameter: Tensor, important: Tensor | None, most: int) -> Tensor | None:
    """Which elements of a gradient are kept, about `most`; None for all."""
    if parameter.numel() <= most:
        return None
    spread = torch.arange(0, parameter.numel(), -(-parameter.numel() // (most // 2)))
    if important is None or important.numel() != parameter.numel():
        return spread
    largest = dense(important).abs().flatten().float().topk(most // 2).indices
    return torch.from_numpy(np.unique(torch.cat([spread, largest]).numpy()))


def take(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Some elements, as numbers that can be added up."""
    flat = tensor.detach().flatten()
    chosen = flat if kept is None else flat[kept]
    return chosen.double() if flat.dtype is torch.float64 else chosen.float()


def thinned(value: Tensor, most: int) -> Tensor:
    """At most so many elements along the last dimension, at equal distances."""
    size = value.shape[-1]
    return value if size <= most else value[..., torch.arange(most) * (size - 1) // (most - 1)]


def dense(tensor: Any) -> Tensor:
    """A gradient as a dense tensor of its own."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole if whole.layout is torch.strided else whole.to_dense()  # type: ignore[no-any-return]


def stack(parts: Sequence[Tensor]) -> Tensor:
    """[parts, uses, elements]; parts that use a weight less often have zeros."""
    most = max(1, *(len(part) for part in parts))
    return torch.stack([torch.cat([part, part.new_zeros(most - len(part), part.shape[1])]) for part in parts])
