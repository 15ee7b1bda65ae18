"""Clipping that looks at a part of the gradient, or at each part before they are averaged."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.hypotheses.parts import Groups, microbatches, replicas, weighed
from stretto.analysis.diagnosis.scenario import EPSILON, FLAT, ROWS, Scenario
from stretto.analysis.diagnosis.step import groups

BY_STAGE = """\
plain     g * C / |g|
by stage  g_s * C / |g_s|        of each stage s"""
BEFORE = """\
plain     clip(mean(g_r))
before    mean(clip(g_r))         of each replica r"""
BY_SHARD = """\
plain     g * C / |g|
by shard  g * C / |a part of g|"""
NOT_CLIPPED = """\
plain     g * C / |g|
missing   g"""
BY_PARAMETER = """\
plain         g * C / |g|
by parameter  g_p * C / |g_p|    of each parameter p"""
MOST_SHARDS = 64
LEAST = 0.999  # factors nearer to 1 than this clip nothing


def by_stage(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Clipped by the length of each stage's gradients: stages as told, else as runs of equal factors."""
    if evidence.step.clip is None or not scenario.clips:
        return
    stages = groups(evidence.step) if evidence.step.cut else runs(evidence, replace(scenario, clips=None))
    if not 1 < len(stages) <= MOST_SHARDS // 2:
        return
    first = [stage[0] for stage in stages]
    made = replace(scenario, clips=stages)
    what = f"is clipped by the length of each of {len(stages)} stages alone, which begin at {', '.join(first)}"
    yield Variant({"stages": len(stages), "first": first}, made, what)


def runs(evidence: Evidence, unclipped: Scenario) -> list[Sequence[str]]:
    """Neighbouring parameters with the same factor to gradients that are not clipped."""
    fit = evidence.fit(unclipped)
    found: list[list[str]] = []
    last = None
    factors: dict[str, float] = {}
    for index, entry in enumerate(evidence.entries):
        factors.setdefault(entry.parameter, float(fit.scales[index]) if fit.scaled[index] < 0.1 else math.nan)
    for name in evidence.step.parameters:
        factor = factors.get(name, math.nan)
        if found and (math.isnan(factor) or last is None or math.isclose(factor, last, rel_tol=1e-3)):
            found[-1].append(name)
        else:
            found.append([name])
        last = last if math.isnan(factor) else factor
    return list(found)


def before_averaging(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Each micro-batch's or replica's gradient is clipped, and then they are averaged."""
    step = evidence.step
    if step.clip is None or step.num_parts < 2:
        return
    shares = evidence.passes[scenario.condition].shares
    if len(shares) < 2:
        return
    unclipped = replace(scenario, clips=None)
    by: dict[str, Groups] = {}
    if step.replicas > 1:
        by["replica"] = replicas(evidence)
    if step.num_parts > step.replicas:
        by["micro-batch"] = [[part] for part in range(step.num_parts)] if step.replicas > 1 else microbatches(evidence)
    for name, each in by.items():
        factors = []
        for number in range(len(each)):
            alone = weighed(shares, each, [float(other == number) for other in range(len(each))], "by those counted")
            lengths = evidence.gradients.lengths(replace(unclipped, parts=unclipped.times(alone)))
            factors.append(evidence.gradients.clip_factor(math.hypot(*lengths.values())))
        yield running(evidence, unclipped, scenario, name, each)
        for again, divided in itertools.product((False, True), ("by all", "equally")):
            clips = [list(step.parameters)] if again else None
            after = " and again after" if again else ""
            yield Variant(
                {"each": name, "again": again, "divided": divided},
                replace(scenario, parts=scenario.times(weighed(shares, each, factors, divided)), clips=clips),
                f"is clipped for each {name} before the average{after}",
            )


def running(evidence: Evidence, unclipped: Scenario, scenario: Scenario, name: str, groups: Groups) -> Variant:
    """The running sum is clipped after each group, within the loop that accumulates."""
    counts = evidence.passes[scenario.condition].shares
    weights = [0.0] * len(counts)
    for group in groups:
        for part in group:
            weights[part] = 1.0
        lengths = evidence.gradients.lengths(replace(unclipped, parts=unclipped.times(weights)))
        factor = evidence.gradients.clip_factor(math.hypot(*lengths.values()))
        weights = [factor * weight for weight in weights]
    made = replace(unclipped, parts=unclipped.times(weights))
    return Variant({"each": f"{name} so far"}, made, f"is clipped after each {name}, while they are added up")


def by_parameter(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Each parameter's gradient is clipped by its own length."""
    if scenario.clips:
        made = replace(scenario, clips=[[name] for name in evidence.step.parameters])
        yield Variant({}, made, "is clipped by its own length")


def apart(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Parameters that have a factor in common, wherever they stand, are clipped by their own length."""
    if not scenario.clips:
        return
    found = evidence.fit(replace(scenario, clips=None))
    shards: dict[float, list[str]] = {}
    for index, entry in enumerate(evidence.entries):
        scale = float(found.scales[index])
        key = next((each for each in shards if math.isclose(each, scale, rel_tol=1e-3)), scale)
        shards.setdefault(key, []).append(entry.parameter)
    step = evidence.step
    for number, pattern in itertools.product(sorted({step.replicas, step.tensor} - {1}), (ROWS, FLAT)):
        made = replace(scenario, clips=None, shards=(pattern, number))
        what = f"is clipped by the length of each of {number} processes' own parts ({pattern})"
        yield Variant({"shards": number, "parts": pattern}, made, what)
    if 1 < len(shards) <= MOST_SHARDS:
        made = replace(scenario, clips=list(shards.values()))
        yield Variant({"shards": len(shards)}, made, f"is clipped by the length of each of {len(shards)} shards alone")


def by_shard(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """All is multiplied by one factor, too large for the whole length: that of a shard was taken."""
    yield from apart(evidence, scenario, fit)
    step = evidence.step
    if step.clip is None or not scenario.clips:
        return
    unclipped = replace(scenario, clips=None)
    found = evidence.fit(unclipped)
    usable = evidence.good(found.scaled) & (found.scales > 0)
    if not bool(usable.any()):
        return
    factor = float(found.scales[usable].median())
    length = math.hypot(*evidence.gradients.lengths(unclipped).values())
    taken = step.clip / factor - EPSILON
    if not (factor < LEAST and 0 < taken < length * LEAST):
        return
    yield Variant(
        {"length": taken, "of": length},
        replace(unclipped, factor=unclipped.factor * factor),
        f"is clipped by a length of {taken:.4g}, that of a part, where all together have {length:.4g}",
        free=1,
    )


def not_clipped(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Clipping is missing."""
    if scenario.clips:
        yield Variant({}, replace(scenario, clips=None), "is not clipped")


HYPOTHESES = (
    Hypothesis("clipped-by-stage", BY_STAGE, by_stage, needs="--clip"),
    Hypothesis("clipped-by-parameter", BY_PARAMETER, by_parameter, needs="--clip"),
    Hypothesis("clipped-before-averaging", BEFORE, before_averaging, needs="--clip, --microbatches or --replicas"),
    Hypothesis("not-clipped", NOT_CLIPPED, not_clipped, needs="--clip"),
    Hypothesis("clipped-by-shard", BY_SHARD, by_shard, needs="--clip"),
)
