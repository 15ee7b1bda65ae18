"""Penalties of methods where a user has no study: those that this package's own studies found, with their spread."""

from collections.abc import Iterable

from stretto.methods.advice import Finding, findings, kin
from stretto.plan.objective import Penalty
from stretto.plan.planned_methods import planned
from stretto.study.penalties import planned_as


def found_penalties(
    names: Iterable[str], optimizer: str, among: Iterable[Finding] | None = None
) -> dict[str, tuple[Penalty, ...]]:
    """{method in plans: the penalties that the studies found of it}, under an optimizer or its nearest kin.

    Where a seed never came to the loss it is the least that the ratio of steps can be, without a spread. Fewer steps
    than plain training's count as many: the studies are of the first hundreds of steps, where local losses gain most.
    """
    known = findings() if among is None else tuple(among)
    own = kin(optimizer, {each.optimizer for each in known})
    found: dict[str, tuple[Penalty, ...]] = {}
    for name in names:
        rows = [each for each in known if each.optimizer == own and is_of(name, each)]
        if rows:
            found[name] = tuple(
                Penalty(max(1.0, each.ratio or each.low), "ours", each.error, each.losses, each.delay) for each in rows
            )
    return found


def is_of(name: str, finding: Finding) -> bool:
    """Whether a finding is of the method that has this name in plans."""
    candidate = planned_as(finding.method, finding.stages, None)
    return finding.method == str(planned(name).method) if candidate is None else candidate.method == name
