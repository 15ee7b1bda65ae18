"""How many steps methods take to a loss, as stretto plan takes it from options or from a study, and prints it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.cli.output import aligned
from stretto.errors import UsageError
from stretto.settings.planning import PlanSettings

if TYPE_CHECKING:
    from stretto.plan import Objective, Problem
    from stretto.study.penalties import MeasuredPenalties


def study_of(settings: PlanSettings) -> "MeasuredPenalties | None":
    """What a study measured, if one is given. Raises UsageError for options that do not go together."""
    from stretto.study.penalties import read_penalties

    folder, loss = settings.measured, settings.target_loss
    if folder is not None and settings.objective != "loss":
        raise UsageError(f"measured={folder} counts for the time to a loss: add --objective loss, or leave it out")
    if loss is not None and folder is None:
        raise UsageError(f"loss={loss:g} is looked up in a study: add --measured FOLDER, or leave it out")
    return None if folder is None else read_penalties(folder, loss)


def objective_of(settings: PlanSettings, study: "MeasuredPenalties | None") -> "Objective":
    """What the plan is to be best in; what is given comes before what a study measured."""
    from stretto.plan import Objective, Penalty

    return Objective(
        goal=settings.objective,  # type: ignore[arg-type]
        critical_batch=settings.critical_batch or (study.critical_batch if study else None),
        least_steps=settings.least_steps or (study.least_steps if study else None) or 1.0,
        penalties={name: Penalty(float(value), "given") for name, value in (settings.penalties or {}).items()},
        measured=study.penalties if study else {},
    )


def with_findings(objective: "Objective", problem: "Problem", study: "MeasuredPenalties | None") -> "Objective":
    """The objective with what this package's own studies found, where there is no study of the user's."""
    from stretto.study.found_penalties import found_penalties

    if objective.goal != "loss" or study is not None:
        return objective
    return replace(objective, measured=found_penalties(problem.names, problem.optimizer))


def methods_of(settings: PlanSettings, objective: "Objective", study: "MeasuredPenalties | None") -> tuple[str, ...]:
    """The methods to try; those that never came to the loss in a study are not, unless their penalty is given."""
    from stretto.plan.planned_methods import names_of

    wanted, given = settings.methods, objective.penalties
    if wanted == ("synchronous",) and settings.objective == "loss":
        wanted = ("all",) if study is None else ("synchronous", *study.penalties, *given)
    if study is None:
        return wanted
    never = {*study.never.values()} - {*study.penalties, *given}
    left = tuple(name for name in names_of(wanted) if name not in never)
    if not left:
        raise UsageError(
            f"none of {', '.join(wanted)} came to a train loss of {study.loss:g} in the study: name others in "
            "--methods, choose a larger --target-loss, or give --penalties"
        )
    return left


def penalty_rows(problem: "Problem", objective: "Objective", study: "MeasuredPenalties | None") -> dict[str, Any]:
    """The penalty of each method and where it is from, as plain data, with what the study says beside them."""
    from stretto.plan.planned_methods import planned

    rows: list[dict[str, Any]] = []
    for name in problem.names:
        if name in objective.penalties:
            rows.append({"method": name, "factor": objective.penalties[name].factor, "is": "given"})
        elif name in objective.measured:
            rows += [
                {"method": name, "factor": penalty.factor, "error": penalty.error, "is": penalty.source,
                 "losses": penalty.losses, "delay": penalty.delay}
                for penalty in objective.measured[name]
            ]  # fmt: skip
        elif not planned(name).drains:
            rows.append({"method": name, "factor": None, "is": "assumed"})
    facts: dict[str, Any] = {
        "critical_batch": objective.critical_batch,
        "least_steps": objective.least_steps,
        "methods": rows,
    }
    if study is not None:
        facts["study"] = {
            "loss": study.loss, "baseline": study.baseline, "seeds": study.seeds, "stages": study.stages,
            "never": list(study.never), "not_planned": list(study.unplanned),
        }  # fmt: skip
    return facts


def in_words(goal: Mapping[str, Any], penalties: Mapping[str, Any]) -> list[str]:
    """What the plan's steps to the loss are made of, and what was known of other methods."""
    plan, error = f"{goal['penalty']:.3g}", goal.get("penalty_error")
    lines = [
        f"{goal['steps']:.4g} steps to the loss: {penalties['least_steps']:.4g} x (1 + {goal['critical_batch']:.4g} / "
        f"batch size) x {plan}{'' if error is None else f' ± {error:.2g}'} ({goal['penalty_is']})"
    ]
    study = penalties.get("study")
    if study:
        lines.append(
            f"measured: steps to train loss {study['loss']:g} on {study['stages']} stages, against "
            f"{study['baseline']}, {study['seeds']} seed{'s' * (study['seeds'] > 1)}"
        )
    rows = [
        (f"  {row['method']}", shown(row["factor"]) + (f" ± {row['error']:.2g}" if row.get("error") else ""),
         row["is"])
        for row in penalties["methods"]
    ]  # fmt: skip
    lines += [aligned(rows)] if rows else []
    if study and study["never"]:
        lines.append(f"left out, as they never came to that loss: {', '.join(study['never'])}")
    if study and study["not_planned"]:
        lines.append(f"measured, but with options that are not planned: {', '.join(study['not_planned'])}")
    return lines


def shown(factor: float | None) -> str:
    """A factor with three digits; a dash where it is assumed."""
    return "–" if factor is None else f"{factor:.3g}"
