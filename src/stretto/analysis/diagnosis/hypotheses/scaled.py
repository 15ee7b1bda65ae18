"""The gradient times a number: a division that is missing, or made twice; a loss scale that was left in."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.nn.batch import first_size

PICTURE = """\
plain     (g0 + g1 + g2 + g3) / 4
scaled    (g0 + g1 + g2 + g3) / 4 / 4"""
MOST_FACTORS = 3  # different ones in one step


def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """One for each factor that entries have in common and that explains them."""
    wrong = ~evidence.good(fit.residuals) & evidence.good(fit.scaled) & (fit.scales != 0)
    left = torch.nonzero(wrong).flatten().tolist()
    for _ in range(MOST_FACTORS):
        if not left:
            return
        factor = float(fit.scales[left].median())
        near = 4 * evidence.tolerance
        alike = [index for index in left if math.isclose(float(fit.scales[index]), factor, rel_tol=near)]
        left = [index for index in left if index not in alike]
        if alike:
            yield scaled_by(evidence, scenario, factor, alike)
    if scenario.clips and scenario.scales == {}:
        yield from before_clipping(evidence, scenario)


def before_clipping(evidence: Evidence, scenario: Scenario) -> Iterator[Variant]:
    """Some entries were scaled, and all were clipped then: the others have a factor in common, too."""
    fit = evidence.fit(scenario)
    usable = evidence.good(fit.scaled) & (fit.scales > 0)
    factors = fit.scales[usable]
    if len(factors) < 2 or bool(usable.logical_not().any()):
        return
    for usual in (float(factors.median()), float(factors.max()), float(factors.min())):
        other = [
            index for index, scale in enumerate(fit.scales.tolist()) if not math.isclose(scale, usual, rel_tol=1e-3)
        ]
        if other and len(other) < len(fit.scales):
            factor = float(fit.scales[other].median()) / usual
            made = scaled_by(evidence, scenario, factor, other)
            moved = replace(made.scenario, factors=made.scenario.scales, scales={})
            yield made._replace(scenario=moved, what=made.what + " before it is clipped", entries=None)


def scaled_by(evidence: Evidence, scenario: Scenario, factor: float, entries: list[int]) -> Variant:
    """The gradients of entries times a factor, by its name if it has one."""
    count = evidence.passes[scenario.condition].count
    examples = float(first_size(evidence.step.inputs))
    known = evidence.step.factors() | named_count(count, "targets") | named_count(examples, "examples")
    near = max(1e-3, evidence.tolerance / 8)
    name = ", or ".join(key for key, value in known.items() if math.isclose(value, factor, rel_tol=near))
    parameters = {evidence.entries[index].parameter for index in entries}
    scales = dict(scenario.scales) | {key: scenario.scales.get(key, 1.0) * factor for key in parameters}
    made = replace(scenario, scales=scales)
    called = f", which is {name}" if name else ""
    options = {"factor": known[name.partition(", or ")[0]] if name else factor} | ({"as": name} if name else {})
    return Variant(options, made, f"is multiplied by {factor:.6g}{called}", entries, free=0 if name else 1)


def named_count(count: float, name: str) -> dict[str, float]:
    return {name: count, f"1 / {name}": 1 / count} if count > 1 else {}


HYPOTHESIS = Hypothesis("scaled", PICTURE, variants)
