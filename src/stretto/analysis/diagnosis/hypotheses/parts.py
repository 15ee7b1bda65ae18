"""Parts of the batch that are left out, counted twice, or averaged without regard to how much each has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant, numbers
from stretto.analysis.diagnosis.scenario import Scenario

MISSING = """\
plain     (g0 + g1 + g2 + g3) / 4
missing    g0 + g1      + g3  / 4    or / 3"""
TWICE = """\
plain     (g0 + g1 + g2 + g3) / 4
twice     (g0 + g1 + g1 + g2 + g3) / 4"""
MEANS = """\
plain     (sum0 + sum1) / (count0 + count1)
means     (sum0 / count0 + sum1 / count1) / 2"""

MOST_TIMES = 64  # that a part may be counted

Groups = Sequence[Sequence[int]]  # the parts of the batch in each micro-batch, or in each replica


def microbatches(evidence: Evidence) -> Groups:
    """Which parts are a micro-batch's, in all replicas."""
    step = evidence.step
    each = step.accumulation * step.microbatches
    return [[replica * each + part for replica in range(step.replicas)] for part in range(each)]


def replicas(evidence: Evidence) -> Groups:
    """Which parts are a replica's."""
    step = evidence.step
    each = step.accumulation * step.microbatches
    return [list(range(replica * each, (replica + 1) * each)) for replica in range(step.replicas)]


def sets(number: int) -> list[tuple[int, ...]]:
    """Which of so many groups may be concerned: one, all but one, the first ones, the last ones."""
    every = range(number)
    found = {(one,) for one in every} | {tuple(other for other in every if other != one) for one in every}
    found |= {tuple(range(first)) for first in range(1, number)} | {
        tuple(range(first, number)) for first in range(1, number)
    }
    return sorted(found, key=len)


def found_weights(evidence: Evidence, scenario: Scenario) -> torch.Tensor | None:
    """The weights of the parts, relative to plain ones, by least squares over all entries; None if nothing tells."""
    size = len(evidence.passes[scenario.condition].shares)
    alone = torch.eye(size).tolist()
    weights = 1 / evidence.lengths.clamp(min=1e-300).square()
    weights[evidence.lengths == 0] = 0
    each = torch.stack([evidence.made(replace(scenario, parts=scenario.times(parts), clips=None)) for parts in alone])
    weighted = each * weights[evidence.owner]
    left, right = weighted @ each.T, weighted @ evidence.given
    if not bool(left.isfinite().all()) or torch.linalg.matrix_rank(left, rtol=1e-9) < size:
        return None
    solved: torch.Tensor = torch.linalg.solve(left, right)
    return solved


def proposed(evidence: Evidence, scenario: Scenario, groups: Groups) -> tuple[int, ...] | None:
    """The groups that hardly count, as the gradients say; None if there are none, or all."""
    weights = found_weights(evidence, scenario)
    if weights is None:
        return None
    means = torch.stack([weights[list(group)].mean() for group in groups]).abs()
    chosen = tuple(torch.nonzero(means < 0.3 * means.max()).flatten().tolist())
    return chosen if 0 < len(chosen) < len(groups) else None


DIVIDED = {"by all": "", "by those counted": ", and is divided by what is left", "equally": ", and is a mean of means"}


def weighed(shares: torch.Tensor, groups: Groups, times: Sequence[float], divided: str) -> list[float]:
    """The factor of each part where groups are counted so many times, and how they are divided."""
    weights = [0.0] * len(shares)
    sums = [float(shares[list(group)].sum()) for group in groups]
    counted = sum(count * factor for count, factor in zip(sums, times, strict=True))
    for group, own, factor in zip(groups, sums, times, strict=True):
        share = {"by all": 1.0, "by those counted": 1 / (counted or 1.0), "equally": 1 / (len(groups) * (own or 1.0))}
        for part in group:
            weights[part] = factor * share[divided]
    return weights


def left_out(what: str, groups_of: Callable[[Evidence], Groups]) -> Hypothesis:
    """The hypothesis that micro-batches, or replicas, are missing."""

    def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
        groups, shares = groups_of(evidence), evidence.passes[scenario.condition].shares
        if len(groups) < 2 or len(shares) < 2:
            return
        more = proposed(evidence, scenario, groups)
        for chosen in dict.fromkeys([*sets(len(groups)), *([more] if more else [])]):
            times = [float(group not in chosen) for group in range(len(groups))]
            for divided, told in DIVIDED.items():
                weights = weighed(shares, groups, times, divided)
                yield Variant(
                    {what: list(chosen), "of": len(groups), "divided": divided},
                    replace(scenario, parts=scenario.times(weights)),
                    f"lacks {named(what, chosen)} of {len(groups)} (counted from 0){told}",
                )

        for divided in DIVIDED if what == "replicas" else ():
            each = [[float(group == own) for group in range(len(groups))] for own in range(len(groups))]
            alone = [replace(scenario, parts=scenario.times(weighed(shares, groups, times, divided))) for times in each]
            yield Variant(
                {what: "each in its own part", "of": len(groups), "divided": divided},
                evidence.assembled(alone, scenario),
                f"is put together from {len(groups)} replicas, each with its own gradient: the sum is missing",
            )

    return Hypothesis(f"{what}-missing", MISSING, variants, needs=f"--{what}")


def named(what: str, chosen: Sequence[int]) -> str:
    """Some micro-batches or replicas in words."""
    name = what.replace("micro", "micro-")
    return f"{name if len(chosen) > 1 else name.removesuffix('es' if 'batch' in name else 's')} {numbers(chosen)}"


def counted_twice(what: str, groups_of: Callable[[Evidence], Groups]) -> Hypothesis:
    """The hypothesis that micro-batches, or replicas, are counted twice, or more often."""

    def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
        groups, shares = groups_of(evidence), evidence.passes[scenario.condition].shares
        if len(groups) < 2 or len(shares) < 2:
            return
        every = [[1.0 + (group == one) for group in range(len(groups))] for one in range(len(groups))]
        for times in [*every, *whole_times(evidence, scenario, groups)]:
            chosen = [group for group, factor in enumerate(times) if factor > 1]
            for divided in DIVIDED:
                often = "twice" if max(times) == 2 else f"{', '.join(f'{times[each]:.0f}' for each in chosen)} times"
                yield Variant(
                    {what: chosen, "of": len(groups), "times": times, "divided": divided},
                    replace(scenario, parts=scenario.times(weighed(shares, groups, times, divided))),
                    f"counts {named(what, chosen)} of {len(groups)} {often} (counted from 0)",
                )

    return Hypothesis(f"{what}-twice", TWICE, variants, needs=f"--{what}")


def whole_times(evidence: Evidence, scenario: Scenario, groups: Groups) -> list[list[float]]:
    """How often each group is counted, if that is read off the gradients as whole numbers of at most MOST_TIMES."""
    weights = found_weights(evidence, scenario)
    if weights is None:
        return []
    means = torch.stack([weights[list(group)].mean() for group in groups])
    least = means.abs()[means.abs() > 0.05 * means.abs().max()].min()
    times = (means / least).round()
    if bool((times < 0).any()) or float(times.max()) > MOST_TIMES or float(times.max()) < 2:
        return []
    return [times.tolist()]


def means(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """The mean over micro-batches, over replicas, or over both, of means over what shares in each."""
    if scenario.condition.whole:  # a loss that is no mean: its parts' means are another loss
        scenario = replace(scenario, condition=replace(scenario.condition, whole=False))
    shares = evidence.passes[scenario.condition].shares
    if len(shares) < 2:
        return
    for over, groups in groupings(evidence).items():
        weights = weighed(shares, groups, [1.0] * len(groups), "equally")
        if any(abs(weight - 1) > 1e-12 for weight in weights):
            yield Variant(
                {"over": over, "shares": [round(float(shares[list(group)].sum()), 6) for group in groups]},
                replace(scenario, parts=scenario.times(weights)),
                f"is a mean over {len(groups)} {over.replace('micro', 'micro-')} of means, which do not weigh alike",
            )


def groupings(evidence: Evidence) -> dict[str, Groups]:
    """Over what means may be taken."""
    step = evidence.step
    every = range(step.num_parts)
    found: dict[str, Groups] = {}
    if step.replicas > 1:
        found["replicas"] = replicas(evidence)
    if step.accumulation * step.microbatches > 1 and step.replicas > 1:
        found["microbatches"] = microbatches(evidence)
    if step.accumulation > 1 and step.microbatches > 1:
        found["accumulation"] = [
            [part for part in every if part // step.microbatches == number]
            for number in range(step.replicas * step.accumulation)
        ]
    if step.num_parts > 1 and step.num_parts != step.replicas:
        found["parts" if step.replicas > 1 else "microbatches"] = [[part] for part in every]
    return found


HYPOTHESES = (
    left_out("microbatches", microbatches),
    counted_twice("microbatches", microbatches),
    left_out("replicas", replicas),
    counted_twice("replicas", replicas),
    Hypothesis("mean-of-means", MEANS, means, needs="--microbatches or --replicas"),
)
