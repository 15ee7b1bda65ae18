"""What stands in a gradient beside the loss: weight decay that was added to it."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

PICTURE = """\
plain     g
coupled   g + decay * w"""


def coupled(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """A multiple of the weights is added to the gradients of those entries that differ.

    Where the weights after the step are known, the optimizer's own decay is coupled instead of decoupled, or the
    reverse.
    """
    if evidence.gradients.rule is not None:
        if not scenario.update:
            what = "has decay where it does not belong: coupled for decoupled, or the reverse"
            yield Variant({"form": "decay coupling"}, replace(scenario, update="decay coupling"), what)
        return
    left, weights = evidence.given - evidence.made(scenario), evidence.weights
    own = evidence.total(weights.square())
    decays = evidence.total(left * weights) / own.clamp(min=1e-300)
    rest = evidence.total((left - decays[evidence.owner] * weights).square()).sqrt()
    like_weights = (rest <= 0.3 * evidence.total(left.square()).sqrt()) & (own > 0) & ~evidence.good(fit.residuals)
    found = {index: float(decays[index]) for index in torch.nonzero(like_weights).flatten().tolist()}
    if not found:
        return
    decay = float(torch.tensor(list(found.values()), dtype=torch.float64).median())
    alike = [index for index, value in found.items() if math.isclose(value, decay, rel_tol=0.02)]
    yield Variant(
        {"decay": decay},
        replace(scenario, decay=scenario.decay + decay),
        f"has {decay:.4g} times the weights added to it",
        alike,
        free=1,
    )


HYPOTHESIS = Hypothesis("decay-coupled", PICTURE, coupled)
