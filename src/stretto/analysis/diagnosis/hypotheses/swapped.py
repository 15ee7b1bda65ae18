"""Gradients of one stage or layer that another one of the same shape has."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

PICTURE = """\
plain     layer 0: g0    layer 1: g1
swapped   layer 0: g1    layer 1: g0"""


def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Each entry that differs has the gradient of that parameter of its shape which fits best."""
    made = evidence.gradients.of(scenario).double()
    shapes = {name: tuple(p.shape) for name, p in evidence.step.parameters.items()}
    of = {name: made[columns] for name, columns in evidence.gradients.columns.items()}
    units = {name: value / (float(value.norm()) or 1.0) for name, value in of.items()}
    source: dict[str, str] = {}
    for index in torch.nonzero(~evidence.good(fit.residuals)).flatten().tolist():
        entry, given = evidence.entries[index], evidence.entry(evidence.given, index)
        if not bool(given.any()):
            continue
        alike = [name for name, shape in shapes.items() if shape == shapes[entry.parameter]]
        if len(alike) < 2:
            continue
        cosines = torch.stack([units[name] @ given for name in alike]) / given.norm()
        best = int(cosines.argmax())
        if alike[best] != entry.parameter and float(cosines[best]) > 0.99:
            source[entry.parameter] = alike[best]
    if source:
        pairs = sorted({" and ".join(sorted(pair)) for pair in map(places, source.items())})
        chosen = [index for index, entry in enumerate(evidence.entries) if entry.parameter in source]
        made_so = replace(scenario, source={**scenario.source, **source})
        yield Variant({"pairs": pairs}, made_so, f"is that of another layer: {', '.join(pairs[:4])}", chosen)


def places(pair: tuple[str, str]) -> tuple[str, str]:
    """Two names up to where they differ."""
    one, other = (name.split(".") for name in pair)
    first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one) - 1)
    return ".".join(one[: first + 1]), ".".join(other[: first + 1])


HYPOTHESIS = Hypothesis("stages-swapped", PICTURE, variants)
