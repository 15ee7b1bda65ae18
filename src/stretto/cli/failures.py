"""What stretto plan takes and tells of failures: goodput, and how often to write checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stretto.cost import Cluster
from stretto.errors import UsageError
from stretto.plan import Plan, Problem
from stretto.plan.reliability import Reliability, goodput_of, needs
from stretto.report.units import number, percent, seconds
from stretto.settings.planning import FailureSettings


def reliability_of(settings: FailureSettings, cluster: Cluster) -> tuple[Reliability | None, list[str]]:
    """What is known of failures, None if too little, and what more it takes where some is known.

    Raises UsageError if an option is given and others that it needs are not.
    """
    try:
        interval = None if settings.checkpoint_interval == "auto" else float(settings.checkpoint_interval)
    except ValueError:
        raise UsageError(
            f"checkpoint_interval={settings.checkpoint_interval!r}: give seconds of work between two checkpoints, such "
            "as 600, or auto"
        ) from None
    known = Reliability(**asdict(settings) | {"checkpoint_interval": interval}).on(cluster)
    missing = known.missing(cluster)
    if not missing:
        return known, []
    if settings != FailureSettings():
        raise UsageError(f"goodput under failures needs more figures: give {needs(missing)}")
    return None, missing if "mtbf_hours" not in missing else []


def goodput_facts(plan: Plan, problem: Problem, known: Reliability) -> dict[str, Any]:
    """The goodput of a plan as plain data: None for an MTBF that is infinite."""
    facts = asdict(goodput_of(plan, problem, known))
    return facts | {"mtbf_seconds": None if math.isinf(facts["mtbf_seconds"]) else facts["mtbf_seconds"]}


def goodput_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of a plan's goodput, and of what it follows from."""
    steps, mtbf = facts["checkpoint_steps"], facts["mtbf_seconds"]
    fails, every = "nothing fails", "no checkpoints"
    if mtbf is not None:
        fails = f"a failure every {spell(mtbf)}, {seconds(facts['restart_seconds'])} to restart"
    if steps is not None:
        every = (
            f"a checkpoint of {seconds(facts['checkpoint_seconds'])} every {spell(facts['interval_seconds'])} "
            f"({steps:,} step{'s' * (steps > 1)})"
        )
    share = percent(facts["share"], 3 if 0.9995 <= facts["share"] < 1 else 1)
    return [("goodput", f"{share} of the time is useful work"), ("", f"{fails}; {every}")]


def spell(value: float) -> str:
    """Seconds as text; days and years where they are many."""
    days = value / 86400
    return seconds(value) if days < 3 else f"{number(days)} days" if days < 1000 else f"{number(days / 365)} years"
