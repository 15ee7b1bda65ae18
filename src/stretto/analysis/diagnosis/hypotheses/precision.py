"""Sums, or all of a step, in a coarser dtype than was meant."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

PICTURE = """\
plain          float32(g0 + g1)
low precision  bfloat16(bfloat16(g0) + bfloat16(g1))"""
LEAST = 0.05  # of the unit of rounding: less is not that dtype's
MOSTLY = 0.97  # of all elements have to be as near as rounding leaves them
ALIKE = 0.5  # least cosine of what is left and of the error of a computation in that dtype
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def low_precision(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Where `evidence` is judged as coarsely as a dtype: whether what is left looks like that dtype's rounding."""
    dtype = evidence.coarse
    if dtype is None or not bool(evidence.good(fit.residuals).all()):
        return
    name = NAMES[dtype]
    if like_rounding(evidence, scenario, dtype):
        yield Variant({"dtype": name, "in": "sums"}, scenario, f"has the rounding of sums in {name}")
    elif not scenario.condition.dtype:
        computed = replace(scenario, condition=replace(scenario.condition, dtype=dtype))
        ours = evidence.made(computed) - evidence.made(scenario)
        left = evidence.given - evidence.made(scenario)
        lengths = (evidence.total(ours.square()) * evidence.total(left.square())).sqrt()
        if float((evidence.total(ours * left) / lengths.clamp(min=1e-300)).median()) >= ALIKE:
            yield Variant({"dtype": name, "in": "computation"}, scenario, f"is as near as a computation in {name} is")


def like_rounding(evidence: Evidence, scenario: Scenario, dtype: torch.dtype) -> bool:
    """Whether almost every element differs by no more than sums of its parts in a dtype may."""
    unit = torch.finfo(dtype).eps / 2
    if float(evidence.fit(scenario).residuals.max()) < LEAST * unit:
        return False
    made = evidence.made(scenario)
    size = len(evidence.passes[scenario.condition].shares)
    alone = torch.eye(size).tolist()
    parts = sum(evidence.made(replace(scenario, parts=scenario.times(one), clips=None)).abs() for one in alone)
    assert isinstance(parts, torch.Tensor), "there is a part"
    allowed = (size + 2) * unit * torch.maximum(parts, made.abs()) + torch.finfo(dtype).smallest_normal
    return float(((evidence.given - made).abs() <= allowed).double().mean()) >= MOSTLY


HYPOTHESIS = Hypothesis("low-precision", PICTURE, low_precision)
