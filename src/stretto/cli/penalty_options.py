"""How many steps methods take to a loss, as stretto plan takes it from options or from a study, and prints it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.cli.output import aligned
from stretto.errors import UsageError
from stretto.options.checks import positive
from stretto.settings.command_line import Trusted
from stretto.settings.planning import PlanSettings

if TYPE_CHECKING:
    from stretto.plan import Objective, Problem
    from stretto.study.penalties import MeasuredPenalties


def study_of(settings: PlanSettings) -> "MeasuredPenalties | None":
    """What a study measured, if one is given. Raises UsageError for options that do not go together."""
    from stretto.study.penalties import read_penalties

    folder, loss = settings.measured, settings.target_loss
    trusted = Trusted(model=settings.model, data=settings.data, loss=settings.loss, metric=settings.metric,
                      optimizer=settings.optimizer, method=settings.methods)  # fmt: skip
    if folder is not None and settings.objective != "loss":
        raise UsageError(f"measured={folder} counts for the time to a loss: add --objective loss, or leave it out")
    if loss is not None and folder is None:
        raise UsageError(f"loss={loss:g} is looked up in a study: add --measured FOLDER, or leave it out")
    return None if folder is None else read_penalties(folder, loss, trusted.functions)


def objective_of(settings: PlanSettings, study: "MeasuredPenalties | None") -> "Objective":
    """What the plan is to be best in; what is given comes before what a study measured."""
    from stretto.plan import Objective, Penalty

    for name, value in (settings.penalties or {}).items():
        positive(f"penalties.{name}", value)
    return Objective(
        goal=settings.objective,  # type: ignore[arg-type]
        critical_batch=settings.critical_batch or (study.critical_batch if study else None),
        least_steps=settings.least_steps or (study.least_steps if study else None) or 1.0,
        penalties={name: Penalty(float(value), "given") for name, value in (settings.penalties or {}).items()},
        measured=study.penalties if study else {},
    )


def with_findings(
    settings: PlanSettings, objective: "Objective", problem: "Problem", study: "MeasuredPenalties | None"
) -> "Objective":
    """The objective with what this package's own studies found, where there is no study of the user's.

    A plan knows no momentum: an optimizer of the table has its usual one, as `stretto train` gives it.
    """
    from stretto.optim.by_name import name_of_setting
    from stretto.study.found_penalties import best_of_delay, found_penalties

    if objective.goal != "loss" or study is not None:
        return objective
    kind = name_of_setting(problem.optimizer if settings.optimizer == "auto" else settings.optimizer)
    found = found_penalties(problem.names, kind)
    return replace(objective, measured=found, best_of_delay=best_of_delay(kind))


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
                {"method": name, "factor": penalty.factor, "error": None, **penalty.remarks, "is": penalty.source,
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
    plan = {key.removeprefix("penalty_"): value for key, value in goal.items()} | {"factor": goal["penalty"]}
    more = "more than " if "bound" in plan else ""
    source = f"{plan['is']}, {found_in_words(plan)}" if "found" in plan else plan["is"]
    lines = [
        f"{more}{goal['steps']:.4g} steps to the loss: {penalties['least_steps']:.4g} x "
        f"(1 + {goal['critical_batch']:.4g} / batch size) x {factor_in_words(plan)} ({source})"
    ]
    study = penalties.get("study")
    if study:
        lines.append(
            f"measured: steps to train loss {study['loss']:g} on {study['stages']} stages, against "
            f"{study['baseline']}, {study['seeds']} seed{'s' * (study['seeds'] > 1)}"
        )
    rows = penalties["methods"]
    several = {row["method"] for row in rows if sum(other["method"] == row["method"] for other in rows) > 1}
    lines += [aligned([line_of(row, among=row["method"] in several) for row in rows])] if rows else []
    if study and study["never"]:
        lines.append(f"left out, as they never came to that loss: {', '.join(study['never'])}")
    if study and study["not_planned"]:
        lines.append(f"measured, but with options that are not planned: {', '.join(study['not_planned'])}")
    return lines


def line_of(row: Mapping[str, Any], *, among: bool) -> tuple[str, str, str]:
    """A line about a method's penalty: the method, the factor, its source.

    `among` several of one method it says for how many losses and which delay.
    """
    losses = f"{row['losses']} loss{'es' * (row['losses'] > 1)}" if among else ""
    name = f"  {row['method']} ({losses}, delay {row['delay']:.3g})" if among else f"  {row['method']}"
    if "found" not in row:
        return name, factor_in_words(row), row["is"]
    more = " or more" if "bound" in row else ""
    return name, f"{found_in_words(row)}, counted as {row['factor']:.3g}{more}", row["is"]


def factor_in_words(row: Mapping[str, Any]) -> str:
    """A factor with three digits, and its error; what it is above; a dash where it is assumed."""
    if row["factor"] is None:
        return "–"
    error = f" ± {row['error']:.2g}" if row.get("error") else ""
    return f"{'> ' * ('bound' in row)}{row['factor']:.3g}{error}"


def found_in_words(row: Mapping[str, Any]) -> str:
    """What a study found where another factor counts."""
    return f"{'> ' * ('bound' in row)}{row['found']:.3g} found"
