"""Looks for the fewest mistakes that explain gradients: one, or two, in the same parameters or in different ones."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses import HYPOTHESES, Hypothesis, Variant
from stretto.analysis.diagnosis.hypotheses.batch import DROPOUT_DIFFERS, redrawn
from stretto.analysis.diagnosis.hypotheses.precision import HYPOTHESIS as LOW_PRECISION
from stretto.analysis.diagnosis.passes import ImpossibleChangeError
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.step import COARSE

MOST_TOGETHER = 8  # ways in which one kind of mistake is made in different parameters
BEAM = 24  # mistakes that are tried together with a second one
HALF = 0.5  # what a fit but for a factor counts less than one with it, in decimal digits


class Mistake(NamedTuple):
    """A hypothesis with its options."""

    hypothesis: Hypothesis
    variant: Variant


@dataclass(frozen=True, eq=False)
class Explanation:
    """Mistakes, the entries that each concerns, and what they leave unexplained, by entry."""

    mistakes: tuple[Mistake, ...]
    concerned: tuple[tuple[int, ...], ...]
    residuals: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(mistake.hypothesis.name for mistake in self.mistakes)

    @property
    def free(self) -> int:
        """How many numbers were taken from the gradients."""
        return sum(mistake.variant.free for mistake in self.mistakes)

    @property
    def rank(self) -> tuple[int, int, list[int]]:
        """Of equally good ones the least comes first."""
        return len(self.mistakes), self.free, sorted(HYPOTHESES.index(m.hypothesis) for m in self.mistakes)


@dataclass(frozen=True, eq=False)
class Node:
    """One mistake, its fit, and what it and plain training leave unexplained."""

    mistake: Mistake
    fit: ScenarioFit
    residuals: Tensor
    score: float


class Search:
    """Explanations of one set of given gradients, the simplest first.

    `sketch` judges by a few elements of each gradient, `whole` confirms by all that are kept. `quick`: stop before
    forwards and backwards of their own where something cheaper explains all.
    """

    def __init__(self, sketch: Evidence, whole: Evidence, *, quick: bool) -> None:
        self._sketch, self._whole, self._quick = sketch, whole, quick
        self._base = sketch.base
        self._plain, self._whole_plain = sketch.plain, whole.plain.residuals
        self.nodes: list[Node] = []

    def run(self) -> list[Explanation]:
        """All explanations with the fewest mistakes, the best first; empty if there are none."""
        if not self._quick:
            found = self._single(costs=False) + self._single(costs=True)
            return self._ordered(found or self._together() or self._after_one())
        return self._ordered(
            self._single(costs=False) or self._together() or self._after_one() or self._single(costs=True)
        )

    def _after_one(self) -> list[Explanation]:
        """What explains all together with another mistake, or with noise."""
        if self._whole.passes.random:
            return self._within_noise()
        return self._coarse() or self._pairs()

    def _ordered(self, found: list[Explanation]) -> list[Explanation]:
        return sorted(found, key=lambda each: each.rank)

    def _coarse(self) -> list[Explanation]:
        """Sums in a coarser dtype, alone or after another mistake."""
        known = [node.mistake for node in sorted(self.nodes, key=lambda each: each.score)[:BEAM]]
        for dtype, rounding in COARSE.items():
            if rounding <= self._whole.rounding:
                continue
            few, coarse = (each.coarser(dtype) for each in (self._sketch, self._whole))
            found = []
            for first in (None, *known, *self._read_off(few)):
                scenario = self._base if first is None else first.variant.scenario
                if not any(LOW_PRECISION.variants(few, scenario, self._sketch.fit(scenario))):
                    continue
                fit = self._whole.fit(scenario)
                variants = LOW_PRECISION.variants(coarse, scenario, fit)
                found += [self._rounded(coarse, first, Mistake(LOW_PRECISION, each), fit) for each in variants]
            if found:
                fewest = min(len(each.mistakes) for each in found)
                return [each for each in found if len(each.mistakes) == fewest]
        return []

    def _read_off(self, evidence: Evidence) -> list[Mistake]:
        """Mistakes that need no pass of their own, as evidence of another tolerance shows them."""
        return [
            Mistake(each, variant)
            for each in HYPOTHESES
            if not each.costs and each is not LOW_PRECISION
            for variant in each.variants(evidence, self._base, evidence.plain)
        ]

    def _within_noise(self) -> list[Explanation]:
        """Other draws of random numbers, alone or after the mistake that leaves least."""
        noisy = self._whole.noisy(redrawn(self._whole, self._base))
        known = [node.mistake for node in sorted(self.nodes, key=lambda each: each.score)[:BEAM]]
        for firsts in ([None], [*known, *self._read_off(noisy)]):
            found = []
            for first in firsts:
                scenario = self._base if first is None else first.variant.scenario
                fit = self._whole.fit(scenario)
                variants = DROPOUT_DIFFERS.variants(noisy, scenario, fit)
                found += [self._rounded(noisy, first, Mistake(DROPOUT_DIFFERS, each), fit) for each in variants]
            if found:
                return sorted(found, key=lambda each: float(each.residuals.mean()))[:1]
        return []

    def _rounded(self, coarse: Evidence, first: Mistake | None, mistake: Mistake, fit: ScenarioFit) -> Explanation:
        plain = self._whole_plain
        every = tuple(range(len(plain)))
        if first is None:
            return Explanation((mistake,), (every,), fit.residuals)
        concerned = torch.nonzero(~coarse.good(plain)).flatten().tolist()
        return Explanation((first, mistake), (tuple(concerned), every), fit.residuals)

    def best(self) -> Explanation | None:
        """What explains most, where nothing explains all."""
        if not self.nodes:
            return None
        node = min(self.nodes, key=lambda each: each.score)
        return self._one(node.mistake)

    def _single(self, *, costs: bool) -> list[Explanation]:
        found = []
        for mistake in self._mistakes(self._base, self._plain, costs):
            fit = self._sketch.fit(mistake.variant.scenario)
            if not bool(fit.residuals.isfinite().all()):
                continue
            residuals = limited(self._plain.residuals, fit.residuals, mistake.variant.entries)
            self.nodes.append(Node(mistake, fit, residuals, self._score(residuals, fit)))
            if self._complete(residuals):
                found += self._confirmed((mistake,))
        return found

    def _together(self) -> list[Explanation]:
        """One kind of mistake, made otherwise in different parameters, by one process or stage each."""
        by_name: dict[str, list[Node]] = {}
        for node in self.nodes:
            by_name.setdefault(node.mistake.hypothesis.name, []).append(node)
        return [each for nodes in by_name.values() for each in self._of_one_kind(nodes)]

    def _of_one_kind(self, nodes: Sequence[Node]) -> list[Explanation]:
        if len(nodes) < 2 or not self._complete(torch.stack([node.residuals for node in nodes]).amin(0)):
            return []
        plain = self._whole_plain
        wrong = torch.nonzero(~self._whole.good(plain)).flatten().tolist()
        left = set(wrong)
        chosen: list[tuple[Node, list[int]]] = []
        fits = {id(node): self._whole.fit(node.mistake.variant.scenario).residuals for node in nodes}
        while left:
            node = max(
                nodes,
                key=lambda each: len(left & self._good(limited(plain, fits[id(each)], each.mistake.variant.entries))),
            )
            explained = left & self._good(limited(plain, fits[id(node)], node.mistake.variant.entries))
            if not explained or len(chosen) >= MOST_TOGETHER:
                return []
            chosen.append((node, sorted(explained)))
            left -= explained
        name = nodes[0].mistake.hypothesis
        if name.name == "scaled" and len(chosen) == 2:
            return []  # two mistakes
        options = {
            "by_parameter": [{**node.mistake.variant.options, "parameters": len(which)} for node, which in chosen]
        }
        what = "; or ".join(node.mistake.variant.what for node, _ in chosen[:3])
        variant = chosen[0][0].mistake.variant._replace(
            options=options, what=what, free=sum(node.mistake.variant.free for node, _ in chosen)
        )
        residuals = torch.stack([plain, *(fits[id(node)] for node, _ in chosen)]).amin(0)
        return [Explanation((Mistake(name, variant),), (tuple(wrong),), residuals)]

    def _good(self, residuals: Tensor) -> set[int]:
        return set(torch.nonzero(self._whole.good(residuals)).flatten().tolist())

    def _pairs(self) -> list[Explanation]:
        found: list[Explanation] = []
        for node in self._beam():
            if found and self._quick:
                break
            scenario = node.mistake.variant.scenario
            after = ScenarioFit(node.residuals, node.fit.scales, node.fit.scaled)
            beside = ScenarioFit(node.residuals, self._plain.scales, self._plain.scaled)
            for base, fit in ((scenario, after), (self._base, beside)):
                for costs in (False,) if self._quick else (False, True):
                    for mistake in self._mistakes(base, fit, costs):
                        if mistake.hypothesis is node.mistake.hypothesis and mistake.hypothesis.name != "scaled":
                            continue
                        second = self._sketch.fit(mistake.variant.scenario).residuals
                        if self._complete(limited(node.residuals, second, mistake.variant.entries)):
                            found += self._confirmed((node.mistake, mistake))
        return unique(found)

    def _beam(self) -> list[Node]:
        """The best mistake of each kind, then the best of all."""
        ordered = sorted(self.nodes, key=lambda each: each.score)
        first: dict[str, Node] = {}
        for node in ordered:
            first.setdefault(node.mistake.hypothesis.name, node)
        chosen = sorted(first.values(), key=lambda each: each.score)
        return [*chosen, *[node for node in ordered if node not in chosen][:BEAM]]

    def _mistakes(self, scenario: Scenario, fit: ScenarioFit, costs: bool) -> Iterator[Mistake]:
        for hypothesis in HYPOTHESES:
            if hypothesis.costs == costs:
                with suppress(ImpossibleChangeError):
                    for variant in hypothesis.variants(self._sketch, scenario, fit):
                        yield Mistake(hypothesis, variant)

    def _complete(self, residuals: Tensor) -> bool:
        return bool(self._sketch.good(residuals).all())

    def _score(self, residuals: Tensor, fit: ScenarioFit) -> float:
        """How many decimal digits are unexplained, on average over entries."""
        tolerance = self._sketch.tolerance
        direct, scaled = (torch.log10((each / tolerance).clamp(min=1)) for each in (residuals, fit.scaled))
        return float(torch.minimum(direct, scaled + HALF).mean())

    def _confirmed(self, mistakes: tuple[Mistake, ...]) -> list[Explanation]:
        """The explanation, judged by all elements that are kept; none if it does not hold."""
        first, *others = mistakes
        explanation = self._two(mistakes) if others else self._one(first)
        return [explanation] if bool(self._whole.good(explanation.residuals).all()) else []

    def _one(self, mistake: Mistake) -> Explanation:
        plain, fit = self._whole_plain, self._whole.fit(mistake.variant.scenario)
        residuals = limited(plain, fit.residuals, mistake.variant.entries)
        concerned = torch.nonzero(~self._whole.good(plain)).flatten().tolist()
        return Explanation((mistake,), (tuple(concerned),), residuals)

    def _two(self, mistakes: tuple[Mistake, ...]) -> Explanation:
        """Which entries each of two concerns: as few as explain them."""
        one, other = mistakes
        good = self._whole.good
        plain = self._whole_plain
        first = limited(plain, self._whole.fit(one.variant.scenario).residuals, one.variant.entries)
        both = limited(first, self._whole.fit(other.variant.scenario).residuals, other.variant.entries)
        alone = self._alone(other, plain)
        of_one, of_other = [], []
        for index in torch.nonzero(~good(plain)).flatten().tolist():
            if good(first)[index]:
                of_one.append(index)
            elif good(alone)[index]:
                of_other.append(index)
            else:
                of_one.append(index)
                of_other.append(index)
        residuals = torch.minimum(both, alone)
        return Explanation(mistakes, (tuple(of_one), tuple(of_other)), residuals)

    def _alone(self, mistake: Mistake, plain: Tensor) -> Tensor:
        """What the second mistake leaves where it is made without the first one."""
        rows = [
            limited(plain, self._whole.fit(variant.scenario).residuals, variant.entries)
            for variant in mistake.hypothesis.variants(self._sketch, self._base, self._plain)
            if dict(variant.options) == dict(mistake.variant.options)
        ]
        return plain if not rows else torch.stack(rows).amin(0)


def limited(before: Tensor, after: Tensor, entries: Sequence[int] | None) -> Tensor:
    """The smaller residual where a mistake is made, and the former elsewhere."""
    least = torch.minimum(before, after)
    if entries is None:
        return least
    made = before.clone()
    made[list(entries)] = least[list(entries)]
    return made


def unique(found: Sequence[Explanation]) -> list[Explanation]:
    """Without those of the same names and options."""
    known: dict[object, Explanation] = {}
    for each in found:
        key = frozenset((m.hypothesis.name, str(sorted(m.variant.options.items()))) for m in each.mistakes)
        known.setdefault(key, each)
    return list(known.values())
