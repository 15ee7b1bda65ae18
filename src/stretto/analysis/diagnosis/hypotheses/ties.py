"""A weight that is used twice, whose gradient is that of one use, or has one use twice."""

from collections.abc import Iterator
from dataclasses import replace

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

MISSING = """\
plain     first use + last use
missing   first use"""
TWICE = """\
plain     first use + last use
twice     2 x (first use + last use)"""
ORDER = ("first", "second", "third and later")


def variants_of(factors: "tuple[float, float, float]", verb: str) -> object:
    """Variants in which one use of a weight has the first of these factors, and the others the second."""
    own, other, all_uses = factors

    def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
        wrong = (~evidence.good(fit.residuals)).tolist()
        values = evidence.passes[scenario.condition].values
        for index, entry in enumerate(evidence.entries):
            uses = values[entry.parameter].shape[1]
            if uses < 2 or not wrong[index]:
                continue
            for use in range(uses):
                weights = [own if number == use else other for number in range(uses)]
                made = replace(scenario, uses={**scenario.uses, entry.parameter: weights})
                what = f"{verb} its {ORDER[use]} use in the forward, of {uses}"
                yield Variant({"parameter": entry.parameter, "use": use, "of": uses}, made, what, [index])
            if all_uses != 1:
                made = replace(scenario, uses={**scenario.uses, entry.parameter: [all_uses] * uses})
                what = f"has each of its {uses} uses in the forward twice"
                yield Variant({"parameter": entry.parameter, "use": "all", "of": uses}, made, what, [index])
            if uses > 2 and own == 0:
                for use in range(uses):
                    weights = [1.0 if number == use else 0.0 for number in range(uses)]
                    made = replace(scenario, uses={**scenario.uses, entry.parameter: weights})
                    what = f"has its {ORDER[use]} use in the forward alone, of {uses}"
                    yield Variant({"parameter": entry.parameter, "only": use, "of": uses}, made, what, [index])

    return variants


HYPOTHESES = (
    Hypothesis("tie-missing", MISSING, variants_of((0.0, 1.0, 1.0), "lacks")),  # type: ignore[arg-type]
    Hypothesis("tie-twice", TWICE, variants_of((2.0, 1.0, 2.0), "counts twice")),  # type: ignore[arg-type]
)
