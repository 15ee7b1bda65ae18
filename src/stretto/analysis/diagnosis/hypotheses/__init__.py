"""Mistakes in computing a gradient, by name; of those that explain equally well the first one is named first."""

from stretto.analysis.diagnosis.hypotheses import (
    batch,
    clipping,
    frozen,
    parts,
    precision,
    scaled,
    stale,
    swapped,
    targets,
    tensor,
    ties,
    updates,
    weights,
)
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant

HYPOTHESES: tuple[Hypothesis, ...] = (
    frozen.HYPOTHESIS,
    *parts.HYPOTHESES,
    *ties.HYPOTHESES,
    *clipping.HYPOTHESES,
    *tensor.HYPOTHESES,
    *targets.HYPOTHESES,
    swapped.HYPOTHESIS,
    *batch.HYPOTHESES,
    stale.HYPOTHESIS,
    weights.HYPOTHESIS,
    *updates.HYPOTHESES,
    precision.HYPOTHESIS,
    scaled.HYPOTHESIS,
)

__all__ = ["HYPOTHESES", "Hypothesis", "Variant"]
