"""Operator parallelism that forgets a sum over processes, or makes it twice."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.passes import Changed
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.step import TrainingStep

MISSING = """\
plain     norm's gradient: of tokens 0 to 3
missing   process 0: of tokens 0 and 1 alone"""
TWICE = """\
plain     process 0 + process 1
twice     2 x (process 0 + process 1)"""
LINEAR_IN_WEIGHTS = ("layer_norm", "rms_norm", "linear", "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__")
MOST_TENSOR = 8  # processes of which each one's share is tried
NEAR = 3  # layers after the last wrong gradient whose input's gradient may lack a sum


class OwnTokens(TorchFunctionMode):
    """Vectors (norms, biases) get the gradient of one process's share of the positions; inputs that of all."""

    def __init__(self, rank: int, of: int) -> None:
        super().__init__()
        self._rank, self._of = rank, of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        vector = any(map(is_vector, tree_leaves((args, kwargs))))
        if not vector or getattr(func, "__name__", "") not in LINEAR_IN_WEIGHTS:
            return func(*args, **kwargs)
        ours, others = (tree_map(partial(held, of_vectors=kind), (args, kwargs)) for kind in (True, False))
        base, own = (func(*given, **named) for given, named in (ours, others))
        if base.dim() < 3:
            return func(*args, **kwargs)
        share = torch.zeros(base.shape[1], dtype=base.dtype)
        share.tensor_split(self._of)[self._rank].fill_(1)
        return base + (own - own.detach()) * share[:, None]


def is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.is_leaf and value.requires_grad


def held(value: Any, of_vectors: bool) -> Any:
    """A tensor without gradient if it is a vector of weights, or, not `of_vectors`, if it is anything else."""
    return value.detach() if isinstance(value, Tensor) and is_vector(value) == of_vectors else value


class LinearGradients(TorchFunctionMode):
    """Some linear layers' inputs get another gradient; outputs and the layers' own gradients stay.

    `rank` of `of`: that of one process's share of the outputs, the sum over them is missing. `twice`: `of` times what
    it should be, before the layer or after it.
    """

    def __init__(self, weights: Sequence[nn.Parameter], of: int, rank: int = 0, twice: str = "") -> None:
        super().__init__()
        self._weights = {weight.data_ptr() for weight in weights}
        self._rank, self._of, self._twice = rank, of, twice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = getattr(func, "__name__", "") == "linear" and len(args) > 1 and args[1].data_ptr() in self._weights
        if not found:
            return func(*args, **kwargs)
        x, weight, *bias = args
        if self._twice == "after":
            return times(func(x, weight, *bias, **kwargs), self._of)
        if self._twice:
            return func(times(x, self._of), weight, *bias, **kwargs)
        rows = share_of(weight, self._rank, self._of)
        own = func(x, weight.detach()[rows])
        share = func(x.detach(), weight, *bias, **kwargs)
        return share.index_add(-1, rows, own - own.detach())


def times(value: Tensor, factor: int) -> Tensor:
    """The same value, whose gradient is multiplied."""
    return factor * value - (factor - 1) * value.detach()


def share_of(weight: Tensor, rank: int, of: int) -> Tensor:
    """The rows of a weight that a process has: of each third, where queries, keys and values are one layer."""
    rows = torch.arange(len(weight))
    parts = rows.view(3, -1) if len(weight) == 3 * weight.shape[1] else rows[None]
    return torch.cat([part.tensor_split(of)[rank] for part in parts])


def own_tokens(step: TrainingStep, rank: int, of: int) -> Changed:
    return Changed(step.inputs, step.target, context=partial(OwnTokens, rank, of))


def other_gradients(step: TrainingStep, names: Sequence[str], **options: Any) -> Changed:
    context = partial(LinearGradients, [step.parameters[name] for name in names], step.tensor, **options)
    return Changed(step.inputs, step.target, context=context)


def changes_of(step: TrainingStep) -> dict[str, Any]:
    """The changes that make these mistakes, by name."""
    ranks = range(min(step.tensor, MOST_TENSOR)) if step.tensor > 1 else ()
    found: dict[str, Any] = {f"tokens of {rank}": partial(own_tokens, rank=rank, of=step.tensor) for rank in ranks}
    for title, names in linear_groups(step).items():
        for rank in ranks:
            found[f"inputs of {title} {rank}"] = partial(other_gradients, names=names, rank=rank)
        for place in ("before", "after") if ranks else ():
            found[f"{place} {title}"] = partial(other_gradients, names=names, twice=place)
    return found


def linear_groups(step: TrainingStep) -> dict[str, list[str]]:
    """Linear layers by themselves, and all those of the same place in other blocks."""
    linear = {f"{name}.weight": module for name, module in step.model.named_modules() if isinstance(module, nn.Linear)}
    alone = {name: [name] for name in linear if name in step.parameters}
    roles: dict[str, list[str]] = {}
    for name in alone:
        roles.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(name)
    several = {role: names for role, names in roles.items() if len(names) > 1}
    blocks: dict[str, list[str]] = {}
    for name in alone:
        if linear[name].out_features > linear[name].in_features:
            blocks.setdefault(f"wide layers of {name.rpartition('.')[0].rpartition('.')[0]}", []).append(name)
            blocks.setdefault("wide layers", []).append(name)
            blocks.setdefault(f"wide layers of {block_of(name)}", []).append(name)
        else:
            blocks.setdefault("narrow layers", []).append(name)
    groups = {title: list(dict.fromkeys(names)) for title, names in blocks.items() if len(set(names)) > 1}
    return alone | several | groups


def block_of(name: str) -> str:
    """A name up to its first number: "blocks.3" of "blocks.3.attn.qkv.weight"."""
    parts = name.split(".")
    return ".".join(parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 1)])


def missing(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Vectors have one process's share; or what lies before a layer has the gradient of one process's outputs."""
    step = evidence.step
    if step.tensor < 2 or scenario.condition.change:
        return
    wrong = ~evidence.good(fit.residuals)
    indices = torch.nonzero(wrong).flatten().tolist()
    vectors = [index for index in indices if step.parameters[evidence.entries[index].parameter].dim() == 1]
    ranks = range(min(step.tensor, MOST_TENSOR))
    for rank in ranks if vectors else ():
        made = replace(scenario, condition=replace(scenario.condition, change=f"tokens of {rank}"))
        what = f"of vectors (norms, biases) is that of process {rank} of {step.tensor} alone: the sum is missing"
        yield Variant({"of": "vectors", "rank": rank, "tensor": step.tensor}, made, what, vectors)
    if not indices or len(vectors) == len(indices):
        return
    names = list(step.parameters)
    last = max(names.index(evidence.entries[index].parameter) for index in indices)
    for title, layers in linear_groups(step).items():
        place = max(names.index(name) for name in layers)
        if not last - NEAR <= place <= last + NEAR * 2:
            continue
        for rank in ranks:
            made = replace(scenario, condition=replace(scenario.condition, change=f"inputs of {title} {rank}"))
            what = f"before {title} is that of process {rank} of {step.tensor} alone: the sum for its input is missing"
            yield Variant({"of": title, "rank": rank, "tensor": step.tensor}, made, what)
        each = [
            replace(scenario, condition=replace(scenario.condition, change=f"inputs of {title} {rank}"))
            for rank in ranks
        ]
        what = f"before {title} is that of each process alone, put together: the sum for its input is missing"
        options = {"of": title, "rank": "each in its own part", "tensor": step.tensor}
        yield Variant(options, evidence.assembled(each, scenario), what)


def twice(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Vectors times the number of processes: a sum of gradients that each had whole already."""
    step = evidence.step
    if step.tensor < 2:
        return
    near = evidence.good(fit.scaled) & ~evidence.good(fit.residuals)
    entries = [
        index
        for index in torch.nonzero(near).flatten().tolist()
        if math.isclose(float(fit.scales[index]), step.tensor, rel_tol=4 * evidence.tolerance)
    ]
    if entries:
        names = {evidence.entries[index].parameter for index in entries}
        scales = {**scenario.scales, **{name: scenario.scales.get(name, 1.0) * step.tensor for name in names}}
        what = f"is summed over {step.tensor} processes, each of which has all of it already"
        yield Variant({"tensor": step.tensor}, replace(scenario, scales=scales), what, entries)


def twice_on_the_way(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """A layer's output, or its input, gets its gradient summed over processes that all have it."""
    step = evidence.step
    if step.tensor < 2 or scenario.condition.change:
        return
    for title in linear_groups(step):
        for place in ("after", "before"):
            made = replace(scenario, condition=replace(scenario.condition, change=f"{place} {title}"))
            what = f"on its way back {place} {title} is summed over {step.tensor} processes that all have it"
            yield Variant({"of": title, "place": place, "tensor": step.tensor}, made, what)


HYPOTHESES = (
    Hypothesis("tensor-sum-missing", MISSING, missing, needs="--tensor", costs=True),
    Hypothesis("tensor-sum-twice", TWICE, twice, needs="--tensor"),
    Hypothesis("tensor-sum-twice", TWICE, twice_on_the_way, needs="--tensor", costs=True),
)
