"""What stretto plan takes and tells of failures: goodput, and how often to write checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stretto.errors import UsageError
from stretto.settings.planning import FailureSettings

WANTED = {
    "mtbf_hours": "--mtbf-hours, the mean time between two failures of one worker (or mtbf_hours of every device in "
    "the cluster's file)",
    "checkpoint_seconds": "--checkpoint-seconds, or --storage-bandwidth in bytes/s, from which they follow (or "
    "storage_bandwidth in the cluster's file)",
    "restart_seconds": "--restart-seconds, from a failure until training goes on (or restart_seconds in the cluster's "
    "file)",
}

if TYPE_CHECKING:
    from stretto.cost import Cluster
    from stretto.plan import Plan, Problem
    from stretto.plan.reliability import Reliability


def reliability_of(settings: FailureSettings, cluster: "Cluster") -> "tuple[Reliability | None, list[str]]":
    """What is known of failures, None if too little, and what more it takes where some is known.

    Raises UsageError if an option is given and others that it needs are not.
    """
    from stretto.plan.reliability import Reliability

    known = Reliability(
        mtbf_hours=settings.mtbf_hours, checkpoint_interval=interval_of(settings.checkpoint_interval),
        checkpoint_seconds=settings.checkpoint_seconds, storage_bandwidth=settings.storage_bandwidth,
        restart_seconds=settings.restart_seconds,
    ).on(cluster)  # fmt: skip
    missing = known.missing(cluster)
    if not missing:
        return known, []
    if settings != FailureSettings():
        raise UsageError(f"goodput under failures needs more figures: give {wanted_words(missing)}")
    return None, missing if "mtbf_hours" not in missing else []


def wanted_words(missing: Sequence[str]) -> str:
    """The options that are missing, in words."""
    return "; and ".join(WANTED[key] for key in missing)


def interval_of(text: str) -> float | None:
    """The seconds between two checkpoints; None for auto. Raises UsageError for other words."""
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"checkpoint_interval={text!r}: give seconds of work between two checkpoints, such as 600, or auto"
        ) from None


def told(plan: "Plan", problem: "Problem", known: "Reliability") -> dict[str, Any]:
    """The goodput of a plan as plain data: None for an MTBF that is infinite."""
    from stretto.plan.reliability import goodput_of

    facts = asdict(goodput_of(plan, problem, known))
    return facts | {"mtbf_seconds": None if math.isinf(facts["mtbf_seconds"]) else facts["mtbf_seconds"]}


def rows_of(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of a plan's goodput, and of what it follows from."""
    from stretto.report.units import percent, seconds

    steps, mtbf = facts["checkpoint_steps"], facts["mtbf_seconds"]
    fails = "nothing fails" if mtbf is None else (
        f"a failure every {spell(mtbf)}, {seconds(facts['restart_seconds'])} to restart"
    )  # fmt: skip
    every = "no checkpoints" if steps is None else (
        f"a checkpoint of {seconds(facts['checkpoint_seconds'])} every {spell(facts['interval_seconds'])} "
        f"({steps:,} step{'s' * (steps > 1)})"
    )  # fmt: skip
    share = percent(facts["share"], 3 if 0.9995 <= facts["share"] < 1 else 1)
    return [("goodput", f"{share} of the time is useful work"), ("", f"{fails}; {every}")]


def spell(value: float) -> str:
    """Seconds as text; days and years where they are many."""
    from stretto.report.units import number, seconds

    days = value / 86400
    return seconds(value) if days < 3 else f"{number(days)} days" if days < 1000 else f"{number(days / 365)} years"
