"""A weight that is used twice, whose gradient is that of one use, or has one use twice."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

MISSING = """\
plain     first use + last use
missing   first use"""
TWICE = """\
plain     first use + last use
twice     2 x (first use + last use)"""
MOST, NONE, CLOSE = 64, 0.01, 0.02  # times; a share of the largest that is none; how far from whole numbers
ORDER = ("first", "second", "third and later")


def variants_of(factors: "tuple[float, float, float]", verb: str) -> object:
    """Variants in which one use of a weight has the first of these factors, and the others the second."""
    own, other, all_uses = factors

    def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
        wrong = (~evidence.good(fit.residuals)).tolist()
        values = evidence.passes[scenario.condition].values
        for index, entry in enumerate(evidence.entries):
            uses = values[entry.parameter].shape[1]
            where = None if scenario.clips else [index]  # a gradient that is clipped with others changes them, too
            if uses < 2 or not wrong[index]:
                continue
            read_off = times_of(evidence, scenario, index) if own > 1 else None
            if read_off is not None:
                made = replace(scenario, uses={**scenario.uses, entry.parameter: read_off})
                what = f"counts uses of the weight {read_off} times (by part of the batch, by use in the forward)"
                yield Variant({"parameter": entry.parameter, "times": read_off, "of": uses}, made, what, where)
            for use in range(uses):
                weights = [own if number == use else other for number in range(uses)]
                made = replace(scenario, uses={**scenario.uses, entry.parameter: weights})
                what = f"{verb} its {ORDER[use]} use in the forward, of {uses}"
                yield Variant({"parameter": entry.parameter, "use": use, "of": uses}, made, what, where)
            if all_uses != 1:
                made = replace(scenario, uses={**scenario.uses, entry.parameter: [all_uses] * uses})
                what = f"has each of its {uses} uses in the forward twice"
                yield Variant({"parameter": entry.parameter, "use": "all", "of": uses}, made, what, where)
            if uses > 2 and own == 0:
                for use in range(uses):
                    weights = [1.0 if number == use else 0.0 for number in range(uses)]
                    made = replace(scenario, uses={**scenario.uses, entry.parameter: weights})
                    what = f"has its {ORDER[use]} use in the forward alone, of {uses}"
                    yield Variant({"parameter": entry.parameter, "only": use, "of": uses}, made, what, where)

    return variants


def times_of(evidence: Evidence, scenario: Scenario, index: int) -> list[list[float]] | None:
    """How often each part's gradient of each use is counted, if that is read off as whole numbers of at most MOST."""
    values = evidence.gradients.taken(evidence.passes[scenario.condition].values[evidence.entries[index].parameter])
    parts, uses, size = values.shape
    if parts * uses > size or not evidence.lengths[index]:
        return None
    basis = values.reshape(parts * uses, size).double()
    found = torch.linalg.lstsq(basis.T, evidence.entry(evidence.given, index)[:, None]).solution.flatten()
    if not bool(found.isfinite().all()) or not bool(found.any()):
        return None
    least = found[found.abs() > NONE * found.abs().max()].abs().min()
    times = (found / least).round()
    if (
        bool(((found / least - times).abs() > CLOSE).any())
        or not 1 < float(times.max()) <= MOST
        or float(times.min()) < 0
    ):
        return None
    return times.view(parts, uses).tolist()  # type: ignore[no-any-return]


HYPOTHESES = (
    Hypothesis("tie-missing", MISSING, variants_of((0.0, 1.0, 1.0), "lacks")),  # type: ignore[arg-type]
    Hypothesis("tie-twice", TWICE, variants_of((2.0, 1.0, 2.0), "counts twice")),  # type: ignore[arg-type]
)
