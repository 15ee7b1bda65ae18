"""Penalties of methods where a user has no study: those that this package's own studies found, with their spread."""

import math
from collections.abc import Iterable, Sequence

from stretto.methods.advice import Finding, findings, rows_for
from stretto.methods.table import ADVISED, method
from stretto.plan.objective import Penalty
from stretto.plan.planned_methods import planned
from stretto.study.penalties import is_planned_as


def found_penalties(
    names: Iterable[str], optimizer: str, among: Sequence[Finding] | None = None
) -> dict[str, tuple[Penalty, ...]]:
    """{method in plans: the penalties that the studies found of it}, of the findings that the advice rests on.

    `optimizer` is a name of the table, or "plain-sgd", and its kin is found for each word, as `rows_for` does.
    """
    known = findings() if among is None else among
    rows = [row for word in ADVISED for row in rows_for(word, optimizer, known)]
    found = {name: tuple(penalty_of(row, known) for row in rows if is_of(name, row)) for name in names}
    return {name: penalties for name, penalties in found.items() if penalties}


def best_of_delay(optimizer: str, among: Sequence[Finding] | None = None) -> tuple[tuple[float, float], ...]:
    """(Mean delay in updates, the least penalty that the studies found of a method with it), under an optimizer."""
    known = findings() if among is None else among
    least: dict[float, float] = {}
    for row in rows_for("async", optimizer, known):
        least[row.delay] = min(penalty_of(row, known).factor, least.get(row.delay, math.inf))
    return tuple(sorted(least.items()))


def penalty_of(row: Finding, among: Iterable[Finding]) -> Penalty:
    """A finding as a penalty of plans.

    Where a seed never came to the loss it is a lower bound, and at least what any method took there that always came.
    Fewer steps than plain training's count as many: the studies are of the first hundreds of steps, where local losses
    gain most.
    """
    measured = row.low if row.ratio is None else row.ratio
    arrived = [each.ratio for each in among if each.ratio is not None and is_beside(row, each)]
    counted = max(1.0, measured, *arrived) if row.ratio is None else max(1.0, measured)
    same = counted == measured
    return Penalty(
        counted, "ours", row.error if same else None, row.losses, row.delay,
        bound="at least" if row.ratio is None else "", found=None if same else measured,
    )  # fmt: skip


def is_beside(one: Finding, other: Finding) -> bool:
    """Whether two findings are of one network, optimizer and number of stages."""
    deep = one.any_depth or other.any_depth or one.stages == other.stages
    return deep and (one.network, one.optimizer) == (other.network, other.optimizer)


def is_of(name: str, finding: Finding) -> bool:
    """Whether a finding is of the method that has this name in plans, with the same heads."""
    tried = planned(name)
    return is_planned_as(tried, finding.method) and method(finding.method).head == tried.method.head
