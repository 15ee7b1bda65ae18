"""Parameters without a gradient: frozen, skipped, left out of the optimizer."""

from collections.abc import Iterator
from dataclasses import replace

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

PICTURE = """\
plain     g
frozen    0, or none"""


def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """The entries that are zero or were not given."""
    wrong = (~evidence.good(fit.residuals)).tolist()
    zero = [index for index, length in enumerate(evidence.lengths.tolist()) if wrong[index] and not length]
    if zero:
        names = {evidence.entries[index].parameter for index in zero}
        none = dict.fromkeys(names, 0.0)
        after = replace(scenario, scales={**scenario.scales, **none})
        yield Variant({"count": len(zero)}, after, "is zero, or was not given", zero)
        if scenario.clips:
            before = replace(scenario, factors={**scenario.factors, **none})
            yield Variant({"count": len(zero)}, before, "is zero, or was not given, before it is clipped")


HYPOTHESIS = Hypothesis("frozen", PICTURE, variants)
