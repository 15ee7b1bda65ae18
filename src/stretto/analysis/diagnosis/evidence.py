"""What a trainer came to, beside what scenarios come to: residuals by parameter."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.analysis.diagnosis.passes import MOST, GradientPasses, ImpossibleChangeError, dense, take
from stretto.analysis.diagnosis.scenario import EPSILON, PATTERNS, Gradients, Scenario
from stretto.analysis.diagnosis.step import COARSE, ROUNDING, TrainingStep
from stretto.analysis.diagnosis.update import UpdateRule

NOISE = 5e-2  # of the largest gradient: what rounding may leave of one that is zero, over the tolerance
SKETCH = 256  # elements of a gradient by which scenarios are first judged


class Entry(NamedTuple):
    """A tensor that was given, under its name in the model, and the parameter whose gradient it should be."""

    name: str
    parameter: str


class ScenarioFit(NamedTuple):
    """How a scenario fits: residuals by entry, the best factor of each, and the residuals after that."""

    residuals: Tensor
    scales: Tensor
    scaled: Tensor


class Evidence:
    """Given gradients, and how well scenarios explain them, for a few of their elements (`sketch`) or all kept ones."""

    def __init__(
        self,
        step: TrainingStep,
        passes: GradientPasses,
        given: Mapping[Entry, Tensor | None],
        base: Scenario,
        *,
        sketch: bool,
        rule: UpdateRule | None = None,
    ) -> None:
        self.step, self.passes, self.base = step, passes, base
        self.gradients = Gradients(step, passes, SKETCH if sketch else MOST, rule)
        self.entries = list(given)
        self.columns = [self.gradients.columns[entry.parameter] for entry in self.entries]
        rows = [self._given(value, entry) for entry, value in given.items()]
        self.given = torch.cat(rows).double()
        sizes = torch.tensor([len(row) for row in rows])
        self.owner = torch.arange(len(rows)).repeat_interleave(sizes)
        self._places = torch.cat([torch.arange(c.start, c.stop) for c in self.columns])
        self._sizes = sizes.double()
        dtypes = [value.dtype for value in given.values() if value is not None]
        dtypes += [torch.float32] if passes.in_float32 else []
        self.coarse: torch.dtype | None = None
        self.limits: Tensor | None = None
        self.rounding = max(ROUNDING.get(dtype, 1e-9) for dtype in [step.dtype, *dtypes])
        self.lengths = self.total(self.given.square()).sqrt()

    def _given(self, value: Tensor | None, entry: Entry) -> Tensor:
        columns = self.gradients.columns[entry.parameter]
        if value is None:
            return torch.zeros(columns.stop - columns.start)
        return self.gradients.taken(take(dense(value), self.passes.kept[entry.parameter]))

    def total(self, values: Tensor) -> Tensor:
        """Sums by entry."""
        return torch.zeros(len(self.entries), dtype=torch.float64).index_add_(0, self.owner, values)

    @cached_property
    def tolerance(self) -> float:
        """Residuals up to this are rounding: of sums, and of a length to which clipping adds a little, or does not."""
        if not self.base.clips or self.coarse:
            return self.rounding
        lengths = self.gradients.lengths(replace(self.base, clips=None)).values()
        return self.rounding + EPSILON / (math.hypot(*lengths) or 1.0)

    @cached_property
    def floors(self) -> Tensor:
        """Lengths that rounding may leave of a gradient that is zero, over the tolerance."""
        plain = self.made(self.base)
        means = (self.total(plain.square()) / self._sizes.clamp(min=1)).sqrt()
        floors = NOISE * means.max() * self._sizes.sqrt()
        if self.gradients.rule is None:
            return floors
        unit = max(torch.finfo(p.dtype).eps for p in self.step.parameters.values())  # of a difference of weights
        return torch.maximum(floors, 2 * unit * self.total(self.weights.square()).sqrt() / self.rounding)

    @cached_property
    def weights(self) -> Tensor:
        """The parameters, in the order of entries."""
        return self.gradients.weights.double()[self._places]

    @cached_property
    def faint(self) -> Tensor:
        """Elements whose gradient is rounding alone, of which an optimizer may make anything."""
        plain = Gradients(self.step, self.passes, self.gradients.most).of(self.base).double()[self._places]
        means = (self.total(plain.square()) / self._sizes.clamp(min=1)).sqrt()
        return plain.abs() <= 10 * max(ROUNDING[p.dtype] for p in self.step.parameters.values()) * means.max()

    def made(self, scenario: Scenario) -> Tensor:
        """The gradients of a scenario, in the order of entries."""
        made = self.gradients.of(scenario).double()[self._places]
        return made if self.gradients.rule is None else torch.where(self.faint, self.given, made)

    def entry(self, values: Tensor, index: int) -> Tensor:
        """The part of an entry in a vector in the order of entries."""
        start = int(self._sizes[:index].sum())
        return values[start : start + int(self._sizes[index])]

    def assembled(self, scenarios: Sequence[Scenario], base: Scenario) -> Scenario:
        """Each process's part of every gradient, put together in the way that fits best, by parameter."""
        vectors = torch.stack([self.gradients.of(each).double() for each in scenarios])
        patterns: dict[str, str] = {}
        for index, entry in enumerate(self.entries):
            given, mine = self.entry(self.given, index), vectors[:, self.columns[index]]
            left = {}
            for pattern in PATTERNS:
                owners = self.gradients.owners(entry.parameter, pattern, len(scenarios))
                made = mine.gather(0, owners[None])[0]  # compared but for a factor, which may be another mistake
                scale = float(given @ made) / (float(made @ made) or 1.0)
                left[pattern] = float((given - scale * made).norm())
            patterns[entry.parameter] = min(left, key=left.__getitem__)
        return replace(base, condition=scenarios[0].condition, processes=tuple(scenarios), patterns=patterns)

    def fit(self, scenario: Scenario) -> ScenarioFit:
        """Residuals of all entries, each relative to the length of the gradient; endless where it cannot be made."""
        try:
            made = self.made(scenario)
        except ImpossibleChangeError:
            endless = torch.full_like(self.lengths, math.inf)
            return ScenarioFit(endless, torch.zeros_like(endless), endless)
        own, cross = self.total(made.square()), self.total(made * self.given)
        scales = torch.where(own > 0, cross / own.clamp(min=1e-300), 0.0)
        least = torch.maximum(self.floors, torch.full_like(self.floors, 1e-300))
        residuals = self.total((self.given - made).square()).sqrt()
        scaled = self.total((self.given - scales[self.owner] * made).square()).sqrt()
        longest = torch.maximum(torch.maximum(own.sqrt(), self.lengths), least)
        return ScenarioFit(residuals / longest, scales, scaled / torch.maximum(self.lengths, least))

    @cached_property
    def plain(self) -> ScenarioFit:
        """How plain training fits."""
        return self.fit(self.base)

    def coarser(self, dtype: torch.dtype) -> "Evidence":
        """The same, where sums may have been rounded to another dtype."""
        made = copy.copy(self)
        made.coarse, made.rounding, made.limits = dtype, COARSE[dtype], None
        vars(made).pop("tolerance", None)
        return made

    def within(self, limits: Tensor) -> None:
        """Let gradients be so far from plain ones, by entry, and still count as equal."""
        self.limits = torch.maximum(limits, torch.full_like(limits, self.tolerance))

    def noisy(self, spread: Tensor) -> "Evidence":
        """The same, where gradients may be so far from plain ones, by entry."""
        made = copy.copy(self)
        made.limits, made.rounding = spread, float(spread.median())
        vars(made).pop("tolerance", None)
        return made

    def good(self, residuals: Tensor) -> Tensor:
        """Which entries are explained up to rounding."""
        return residuals <= (self.tolerance if self.limits is None else self.limits)
