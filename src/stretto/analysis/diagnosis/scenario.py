"""How gradients may have come about: what passes were computed with, and how their parts were put together."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stretto.analysis.diagnosis.passes import MOST, Condition, GradientPasses, thinned
from stretto.analysis.diagnosis.step import TrainingStep
from stretto.analysis.diagnosis.update import UpdateRule

PLAIN = Condition()
PATTERNS = ("the first one's", "rows", "rows of each third", "columns", "parts of one long vector")
FIRST, ROWS, THIRDS, COLUMNS, FLAT = PATTERNS  # thirds: queries, keys and values
EPSILON = 1e-6  # that torch.nn.utils.clip_grad_norm_ adds to a length


@dataclass(frozen=True, eq=False)
class Scenario:
    """A gradient, made of contributions in this order; the default is plain training.

    `parts`: a factor for each part of the batch; `uses`: for each use of a parameter, or for each part and use.
    `source`: whose gradient a parameter has. `decay`: the multiple of the weights that is added. `factors`: of
    single parameters; `factor`: of all; `scales`: of single parameters, after clipping. `clips`: groups of
    parameters that are clipped together; None for none. `update` and `rate`: what is changed in the optimizer's
    step, and the factor of its learning rate, where the gradient is looked at through one.

    `processes`: each of them has a part of every gradient, by `patterns` of parameters (PATTERNS); the parts are put
    together. `shards`: a pattern and a number of processes, each of which clips its parts by their length.
    """

    condition: Condition = PLAIN
    parts: tuple[float, ...] | None = None
    uses: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    factor: float = 1.0
    decay: float = 0.0
    clips: Sequence[Sequence[str]] | None = None
    scales: Mapping[str, float] = field(default_factory=dict)
    processes: "tuple[Scenario, ...]" = ()
    patterns: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[str, int] | None = None
    update: str = ""
    rate: float = 1.0

    def times(self, parts: Sequence[float]) -> tuple[float, ...]:
        """Its factors of parts, each times another."""
        return tuple(parts) if self.parts is None else tuple(a * b for a, b in zip(self.parts, parts, strict=True))


class Gradients:
    """The gradients of scenarios, one after the other in one vector. `most` elements of each are taken.

    With a `rule`, what an optimizer makes of them: changes of the weights. `columns[name]`: where a parameter's stand.
    """

    def __init__(
        self, step: TrainingStep, passes: GradientPasses, most: int = MOST, rule: UpdateRule | None = None
    ) -> None:
        self.step, self.passes, self.rule = step, passes, rule
        self.most = most
        self._sums: dict[Condition, Tensor] = {}
        sizes = [min(most, passes.size(name)) for name in step.parameters]
        ends = [0, *itertools.accumulate(sizes)]
        self.columns = {name: slice(*ends[n : n + 2]) for n, name in enumerate(step.parameters)}

    def of(self, scenario: Scenario) -> Tensor:
        """All gradients."""
        made = self._summed(scenario)
        if scenario.clips:
            lengths = self.lengths(scenario)
            for group in scenario.clips:
                factor = self.clip_factor(math.hypot(*(lengths[name] for name in group)))
                for name in group:
                    made[self.columns[name]] *= factor
        if scenario.shards is not None:
            made = made * self._shard_factors(scenario)
        for name, scale in scenario.scales.items():
            made[self.columns[name]] *= scale
        if self.rule is not None:
            weights = self.weights.to(made)
            made = scenario.rate * self.rule.applied(made, self.columns, weights, scenario.update)
        return made

    def lengths(self, scenario: Scenario) -> dict[str, float]:
        """The length of each parameter's gradient, of all its elements, before it is clipped."""
        whole = self.whole
        squares = whole._summed(scenario).double().square()
        ratios = self.passes[scenario.condition].squares
        return {
            name: math.sqrt(float(squares[columns].sum()) * ratios[scenario.source.get(name, name)])
            for name, columns in whole.columns.items()
        }

    @cached_property
    def whole(self) -> "Gradients":
        """The same of all elements that are kept."""
        return self if self.most >= MOST else Gradients(self.step, self.passes)

    def owners(self, name: str, pattern: str, processes: int) -> Tensor:
        """Which of so many processes has each of the taken elements of a parameter."""
        parameter, kept = self.step.parameters[name], self.passes.kept[name]
        places = self.thinned(torch.arange(parameter.numel()) if kept is None else kept)
        if pattern == FIRST or not parameter.dim():
            return torch.zeros_like(places)
        size, along = parameter.numel(), places
        if pattern == FLAT:
            before = itertools.takewhile(lambda other: other != name, self.step.parameters)
            along = places + sum(self.step.parameters[other].numel() for other in before)
            size = sum(p.numel() for p in self.step.parameters.values())
        elif pattern == COLUMNS:
            size = parameter.shape[-1]
            along = places % size
        else:
            size = parameter.shape[0]
            along = places // (parameter.numel() // size)
            if pattern == THIRDS and size % 3 == 0:
                size //= 3
                along = along % size
        ends = torch.tensor([len(part) for part in torch.arange(size).tensor_split(processes)]).cumsum(0)
        return torch.searchsorted(ends, along, right=True)

    def _shard_factors(self, scenario: Scenario) -> Tensor:
        """What each process multiplies its parts by when it clips them alone."""
        assert scenario.shards is not None, "only asked for where there are some"
        pattern, processes = scenario.shards
        whole, ratios = self.whole, self.passes[scenario.condition].squares
        squares = whole._summed(scenario).double().square()
        sums = torch.zeros(processes, dtype=torch.float64)
        for name, columns in whole.columns.items():
            sums.index_add_(0, whole.owners(name, pattern, processes), squares[columns] * ratios[name])
        factors = torch.tensor([self.clip_factor(math.sqrt(each)) for each in sums.tolist()])
        return torch.cat([factors[self.owners(name, pattern, processes)] for name in self.columns])

    def _summed(self, scenario: Scenario) -> Tensor:
        if scenario.processes:
            vectors = torch.stack([self._summed(each) for each in scenario.processes])
            made = vectors[0].clone()
            for name, columns in self.columns.items():
                owners = self.owners(name, scenario.patterns.get(name, FIRST), len(vectors))
                made[columns] = vectors[:, columns].gather(0, owners[None])[0]
            return made
        contributions = self.passes[scenario.condition]
        shares = contributions.shares
        parts = torch.ones_like(shares) if scenario.parts is None else torch.tensor(scenario.parts, dtype=shares.dtype)
        sums = self.parts_of(scenario.condition)
        parts = parts.to(sums)
        made = parts @ sums
        for name, uses in scenario.uses.items():
            value = self.taken(contributions.values[name])
            factors = torch.tensor(uses, dtype=value.dtype).expand(len(value), -1)
            made[self.columns[name]] = torch.einsum("p,pu,pue->e", parts.to(value), factors, value).to(made)
        if scenario.source:
            before = made.clone()
            for name, source in scenario.source.items():
                made[self.columns[name]] = before[self.columns[source]]
        if scenario.decay:
            made += scenario.decay * self.weights
        made *= scenario.factor
        for name, factor in scenario.factors.items():
            made[self.columns[name]] *= factor
        return made

    def parts_of(self, condition: Condition) -> Tensor:
        """The sums of losses' gradients of each part, [parts, width], over all uses."""
        if condition not in self._sums:
            values = self.passes[condition].values
            self._sums[condition] = torch.cat([self.taken(values[name]).sum(1) for name in self.columns], 1)
        return self._sums[condition]

    def taken(self, value: Tensor) -> Tensor:
        """So many of the kept elements, at equal distances."""
        return value if value.shape[-1] <= self.most else self.thinned(value).double()

    def thinned(self, value: Tensor) -> Tensor:
        """The same of any values along the last dimension."""
        return thinned(value, self.most)

    @cached_property
    def weights(self) -> Tensor:
        """The parameters themselves."""
        return torch.cat([self.taken(self.passes.weight(name)) for name in self.columns])

    def clip_factor(self, length: float) -> float:
        """What clipping multiplies gradients of this length by."""
        assert self.step.clip is not None, "groups are clipped only where a bound is given"
        return min(1.0, self.step.clip / (length + EPSILON))
