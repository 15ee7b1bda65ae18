"""What stretto plan knows of the steps that methods take to a loss, and how it says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import aligned

if TYPE_CHECKING:
    from stretto.plan import Objective, Penalty, Problem
    from stretto.study.penalties import MeasuredPenalties


def study_of(folder: Path | None, objective: str, loss: float | None) -> "MeasuredPenalties | None":
    """What a study measured, if one is given. Raises UsageError for options that do not go together."""
    from stretto.errors import UsageError
    from stretto.study.penalties import read_penalties

    if folder is not None and objective != "loss":
        raise UsageError(f"measured={folder} counts for the time to a loss: add --objective loss, or leave it out")
    if loss is not None and folder is None:
        raise UsageError(f"loss={loss:g} is looked up in a study: add --measured FOLDER, or leave it out")
    return None if folder is None else read_penalties(folder, loss)


def aim_of(
    goal: str, critical_batch: float | None, least_steps: float | None, penalties: Mapping[str, Any],
    seen: "MeasuredPenalties | None",
) -> "Objective":  # fmt: skip
    """What the plan is to be best in; what is given comes before what was measured."""
    from stretto.plan import Objective, Penalty

    return Objective(
        goal=goal,  # type: ignore[arg-type]
        critical_batch=critical_batch or (seen.critical_batch if seen else None),
        least_steps=least_steps or (seen.least_steps if seen else None) or 1.0,
        penalties={name: Penalty(float(value), "given") for name, value in penalties.items()},
        measured=seen.penalties if seen else {},
    )


def methods_of(
    wanted: tuple[str, ...], objective: str, given: "Mapping[str, Penalty]", seen: "MeasuredPenalties | None"
) -> tuple[str, ...]:
    """The methods to try; those that never came to the loss in a study are not, unless their penalty is given."""
    from stretto.errors import UsageError
    from stretto.plan.planned_methods import names_of

    if wanted == ("synchronous",) and objective == "loss":
        wanted = ("all",) if seen is None else ("synchronous", *seen.penalties, *given)
    if seen is None:
        return wanted
    never = {*seen.never.values()} - {*seen.penalties, *given}
    left = tuple(name for name in names_of(wanted) if name not in never)
    if not left:
        raise UsageError(
            f"none of {', '.join(wanted)} came to a train loss of {seen.loss:g} in the study: name others in "
            "--methods, choose a larger --loss, or give --penalties"
        )
    return left


def weighed(problem: "Problem", aim: "Objective", seen: "MeasuredPenalties | None") -> dict[str, Any]:
    """Where penalties are from, as plain data: method by method, and what the study says beside them."""
    from stretto.plan.planned_methods import planned

    rows: list[dict[str, Any]] = []
    for name in problem.names:
        if name in aim.penalties:
            rows.append({"method": name, "factor": aim.penalties[name].factor, "is": "given"})
        elif name in aim.measured:
            rows += [{"method": name, "factor": each.factor, "error": each.error, "is": each.source,
                      "losses": each.losses, "delay": each.delay} for each in aim.measured[name]]  # fmt: skip
        elif not planned(name).drains:
            rows.append({"method": name, "factor": None, "is": "assumed"})
    told: dict[str, Any] = {"critical_batch": aim.critical_batch, "least_steps": aim.least_steps, "methods": rows}
    if seen is not None:
        told["study"] = {
            "loss": seen.loss, "baseline": seen.baseline, "seeds": seen.seeds, "stages": seen.stages,
            "never": list(seen.never), "not_planned": list(seen.unplanned),
        }  # fmt: skip
    return told


def in_words(goal: Mapping[str, Any], weighed: Mapping[str, Any]) -> list[str]:
    """What the plan's steps to the loss are made of, and what was known of other methods."""
    plan, error = f"{goal['penalty']:.3g}", goal.get("penalty_error")
    lines = [
        f"{goal['steps']:.4g} steps to the loss: {weighed['least_steps']:.4g} x (1 + {goal['critical_batch']:.4g} / "
        f"batch size) x {plan}{'' if error is None else f' ± {error:.2g}'} ({goal['penalty_is']})"
    ]
    study = weighed.get("study")
    if study:
        lines.append(
            f"measured: steps to train loss {study['loss']:g} on {study['stages']} stages, against "
            f"{study['baseline']}, {study['seeds']} seed{'s' * (study['seeds'] > 1)}"
        )
    rows = [
        (f"  {each['method']}", shown(each["factor"]) + (f" ± {each['error']:.2g}" if each.get("error") else ""),
         each["is"])
        for each in weighed["methods"]
    ]  # fmt: skip
    lines += [aligned(rows)] if rows else []
    if study and study["never"]:
        lines.append(f"left out, as they never came to that loss: {', '.join(study['never'])}")
    if study and study["not_planned"]:
        lines.append(f"measured, but with options that are not planned: {', '.join(study['not_planned'])}")
    return lines


def shown(factor: float | None) -> str:
    """A factor in a few characters."""
    return "–" if factor is None else f"{factor:.3g}"
