"""How many steps methods take to a loss, over those of plain training: given, measured by a study, or found by ours.

From a finished study: the steps to a train loss, compared with plain training. At each batch size a method counts with
the options (the learning rate) that need the fewest steps, mean over seeds. Steps are interpolated between two
evaluations, as the report's arrivals are. A penalty is the geometric mean of the ratios of steps to those of plain
training with the same seed and batch size; its error is their standard error over seeds.
"""

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

from stretto.analysis.batch_tradeoff import fit
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.methods.advice import FAMILY_OF, advised, meaning
from stretto.methods.findings import Finding, findings, rows_for
from stretto.methods.synchronous_pipelines import BASELINE
from stretto.methods.table import ADVISED, builder, is_advised, method
from stretto.optim.by_name import name_of_setting
from stretto.options.checks import positive
from stretto.options.import_object import refuse_functions
from stretto.options.named import parse
from stretto.plan import Candidate, Objective, Penalty, Problem
from stretto.plan.objective import mean_delay, num_losses
from stretto.plan.planned_methods import FAMILIES, PlannedMethod, as_planned, catalogue, names_of, planned
from stretto.report import TRAIN_LOSS, Record
from stretto.report.panel import choose, crossing
from stretto.settings.command_line import Trusted
from stretto.settings.planning import PlanSettings

Steps = Mapping[tuple[int, int], float]  # {(batch size, seed): steps to the loss}
REPEAT = "run stretto compare"
Told = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MeasuredPenalties:
    """Penalties of methods in the steps to a train loss, and the critical batch size, measured by a study.

    `penalties` are by the planner's methods, several if a method was run in several ways. `never` is {method: the
    planner's method} of those that did not reach the loss; `unplanned` are methods whose options or shared workers the
    planner does not know. `critical_batch` and `least_steps` (at ever larger batches) are None if the study does not
    determine them.
    """

    loss: float
    baseline: str
    seeds: int
    stages: int
    penalties: Mapping[str, tuple[Penalty, ...]]
    never: Mapping[str, str]
    unplanned: tuple[str, ...]
    critical_batch: float | None
    least_steps: float | None


def measure_penalties(
    records: Sequence[Record],
    stages: int,
    *,
    workers: int | None = None,
    loss: float | None = None,
    where: str = "the study",
    trusted: Collection[str] = (),
) -> MeasuredPenalties:
    """Measure penalties on finished runs with this number of stages; without a `loss` at one of the report's cut-offs.

    `where` names the runs in errors. Raises UsageError if nothing can be compared.
    """
    names = list(dict.fromkeys(record.method for record in records))
    refuse_functions(where, *(name for name in names if name not in trusted))
    baseline = baseline_of(names, where)
    goal = hardest_cutoff(records, baseline, where) if loss is None else loss
    steps = {name: steps_to(goal, [record for record in records if record.method == name]) for name in names}
    refuse_useless(goal, steps[baseline], [record for record in records if record.method == baseline], where)
    penalties: dict[str, tuple[Penalty, ...]] = {}
    unplanned: list[str] = []
    never: dict[str, str] = {}
    for name in names:
        candidate = planned_as(name, stages, workers)
        if method(name).synchronous:
            continue  # it is plain training
        if candidate is None:
            unplanned.append(name)
        elif result := mean_penalty(steps[name], steps[baseline], candidate):
            penalties[candidate.method] = (*penalties.get(candidate.method, ()), result)
        else:
            never[name] = candidate.method
    by_batch: dict[int, list[float]] = {}
    for (batch, _), number in sorted(steps[baseline].items()):
        by_batch.setdefault(batch, []).append(number)
    means = {batch: fmean(numbers) for batch, numbers in by_batch.items()}
    curve = fit([(number, batch * number) for batch, number in means.items()])
    return MeasuredPenalties(
        loss=goal,
        baseline=baseline,
        seeds=len({seed for _, seed in steps[baseline]}),
        stages=stages,
        penalties=penalties,
        never=never,
        unplanned=tuple(unplanned),
        critical_batch=None if curve is None else curve.critical_batch,
        least_steps=None if curve is None else curve.min_steps,
    )


def baseline_of(names: Sequence[str], where: str) -> str:
    """The method of plain training: backprop if the study has it, else another synchronous method."""
    plain = [name for name in names if method(name).synchronous]
    if not plain:
        raise UsageError(
            f"{where} has {', '.join(names) or 'no runs'}, and no backprop to compare steps with: {REPEAT} again with "
            "backprop among --methods"
        )
    return min(plain, key=lambda name: name != BASELINE)


def hardest_cutoff(records: Sequence[Record], baseline: str, where: str) -> float:
    """The train loss, among the report's cut-offs that plain training reaches, that most methods reach.

    Of several, the lowest.
    """
    names = {record.method for record in records}
    best: tuple[int, float] | None = None
    for cutoff in reversed(choose(records, TRAIN_LOSS)):
        reach = {name for name in names if steps_to(cutoff, [record for record in records if record.method == name])}
        if baseline in reach and (best is None or len(reach) > best[0]):
            best = len(reach), cutoff
    if best is None:
        raise UsageError(
            f"{where}: {baseline} never got better than it began, so no loss can be aimed at: {REPEAT} "
            "again with other learning rates, or more --steps"
        )
    return best[1]


def refuse_useless(goal: float, plain: Steps, records: Sequence[Record], where: str) -> None:
    """Raise UsageError for a loss that plain training never reaches, or has reached at its first evaluation."""
    losses = [point.train_loss for record in records for point in record.points]
    if not plain:
        raise UsageError(
            f"{where}: with no learning rate do all seeds of {records[0].method} reach a train loss of {goal:g}; its "
            f"least was {min(losses, default=math.nan):.4g}: choose a larger --target-loss, or run longer"
        )
    first = min(record.points[0].step for record in records if record.points)
    if min(plain.values()) <= first:
        raise UsageError(
            f"{where}: {records[0].method} has a train loss of {goal:g} at its first evaluation, after {first} steps, "
            "so steps to it cannot be told apart: choose a smaller --target-loss"
        )


def steps_to(loss: float, records: Sequence[Record]) -> dict[tuple[int, int], float]:
    """{(batch size, seed): steps to a loss} of one method, at the options with the fewest where all seeds reach it."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.configuration, []).append(record)
    best: dict[int, dict[int, float]] = {}
    for group in groups.values():
        arrivals = [(record.seed, arrival(record, loss)) for record in group]
        steps = {seed: step for seed, step in arrivals if step is not None}
        batch = group[0].options["batch_size"]
        if len(steps) == len(arrivals) and (batch not in best or fmean(steps.values()) < fmean(best[batch].values())):
            best[batch] = steps
    return {(batch, seed): step for batch, steps in best.items() for seed, step in steps.items()}


def arrival(record: Record, loss: float) -> float | None:
    """The step at which a run's train loss crosses `loss`, as the report has it; None if it never does."""
    crossed = crossing(record, TRAIN_LOSS, loss)
    return None if crossed is None else crossed.step


def mean_penalty(steps: Steps, plain: Steps, candidate: Candidate) -> Penalty | None:
    """The mean ratio of steps to plain training, and its error; None if no two runs can be compared."""
    logs: dict[int, list[float]] = {}
    for (batch, seed), number in steps.items():
        if (batch, seed) in plain:
            logs.setdefault(seed, []).append(math.log(number / plain[batch, seed]))
    if not logs:
        return None
    by_seed = [fmean(ratios) for ratios in logs.values()]
    factor = math.exp(fmean(by_seed))
    error = factor * stdev(by_seed) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else None
    return Penalty(factor, "measured", error, num_losses(candidate), mean_delay(candidate))


def planned_as(name: str, stages: int, workers: int | None) -> Candidate | None:
    """The planner's candidate for a method of a study; None for options or shared workers that it does not plan."""
    for key, tried in catalogue().items():
        if not is_planned_as(tried, name):
            continue
        planning, options = tried.planning, options_of(name)
        pipeline = stages // planning.stages_per_worker
        if workers not in (None, pipeline):
            return None
        count = options.get(planning.cut) if planning.cut else 1
        losses = options[planning.losses] if planning.losses else 1
        return Candidate(pipeline, Mesh(), 1, key, count or stages, losses=losses)
    return None


def is_planned_as(tried: PlannedMethod, name: str) -> bool:
    """Whether a method has all options of a method of plans, but for what a plan chooses, its heads and `combine`."""
    if parse(name)[0] != tried.base:
        return False
    options, wanted = options_of(name), {**options_of(tried.base), **tried.method.options}
    free = {tried.planning.cut, tried.planning.losses, "head", "combine"}
    return all(options.get(key) == wanted.get(key) for key in {*options, *wanted} - free)


def options_of(name: str) -> dict[str, Any]:
    """{option of a method: its value}, written or by default."""
    base, written = parse(name)
    return {key: each.default for key, each in inspect.signature(builder(base)).parameters.items()} | written


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
    bound: Literal["", "at least"] = "at least" if row.ratio is None else ""
    error, found = (row.error, None) if counted == measured else (None, measured)
    return Penalty(counted, "ours", error, row.losses, row.delay, bound=bound, found=found)


def is_beside(one: Finding, other: Finding) -> bool:
    """Whether two findings are of one network, optimizer and number of stages."""
    deep = one.any_depth or other.any_depth or one.stages == other.stages
    return deep and (one.network, one.optimizer) == (other.network, other.optimizer)


def is_of(name: str, finding: Finding) -> bool:
    """Whether a finding is of the method that has this name in plans, with the same heads."""
    tried = planned(name)
    return is_planned_as(tried, finding.method) and method(finding.method).head == tried.method.head


def study_of(settings: PlanSettings) -> MeasuredPenalties | None:
    """What a study measured, if one is given.

    Raises UsageError for options that do not go together, and for a study that is unfinished or has nothing to compare.
    The plan's settings have to name every function that the study's settings name.
    """
    folder, loss = settings.measured, settings.target_loss
    if folder is not None and settings.objective != "loss":
        raise UsageError(f"measured={folder} counts for the time to a loss: add --objective loss, or leave it out")
    if loss is not None and folder is None:
        raise UsageError(f"loss={loss:g} is looked up in a study: add --measured FOLDER, or leave it out")
    if folder is None:
        return None
    from stretto.study.study import read_study

    named: dict[str, Any] = {key: getattr(settings, key) for key in ("model", "data", "loss", "metric", "optimizer")}
    trusted = Trusted(**named, method=settings.methods).functions
    study = read_study(folder, trusted)
    if study.pending:
        raise UsageError(
            f"{folder}: {len(study.pending)} of {len(study.tasks)} runs are not finished; the stretto compare that "
            "began them makes the others"
        )
    stages, workers = study.settings.stages, study.settings.workers
    assert stages is not None, "settings of a study on the disk are resolved"
    return measure_penalties(study.records(), stages, workers=workers, loss=loss, where=str(folder), trusted=trusted)


def objective_of(settings: PlanSettings, study: MeasuredPenalties | None) -> Objective:
    """What the plan is to be best in; what is given comes before what a study measured."""
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
    settings: PlanSettings, objective: Objective, problem: Problem, study: MeasuredPenalties | None
) -> Objective:
    """The objective with what this package's own studies found, where there is no study of the user's.

    A plan knows no momentum: an optimizer of the table has its usual one, as `stretto train` gives it.
    """
    if objective.goal != "loss" or study is not None:
        return objective
    kind = name_of_setting(problem.optimizer if settings.optimizer == "auto" else settings.optimizer)
    found = found_penalties(problem.names, kind)
    return replace(objective, measured=found, best_of_delay=best_of_delay(kind))


def methods_of(settings: PlanSettings, objective: Objective, study: MeasuredPenalties | None) -> tuple[str, ...]:
    """The methods to try; those that never came to the loss in a study are not, unless their penalty is given."""
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


def without_words(names: Iterable[str]) -> tuple[str, ...]:
    """Methods with their family in place of "async" and "local": what may have heads, before more is known."""
    found = []
    for name in names:
        word, options = parse(name)
        found.append(FAMILY_OF[word] if is_advised(name) else name)
        if is_advised(name) and "head" in options:
            found.append(f"greedy(head={options['head']})")
    return tuple(found)


def words_in(settings: PlanSettings, names: Sequence[str], usual: str, workers: int) -> tuple[tuple[str, ...], Told]:
    """The methods with what "async" and "local" stand for in their place, and {word: what it stands for, and why}.

    A plan chooses the number of stages, so that a word stands for all that it stands for on up to as many as there are
    `workers`. "local" alone is the family, of which the plan chooses by time itself. `usual` is the optimizer where
    none is named.
    """
    found: list[str] = []
    told: Told = {}
    depths = sorted({*(2**n for n in range(1, workers.bit_length())), max(2, workers)})
    for name in names:
        if not is_advised(name):
            found.append(name)
            continue
        kind = name_of_setting(usual if settings.optimizer == "auto" else settings.optimizer)
        chosen = [advised(name, kind, stages) for stages in depths]
        meant = [name] if name in FAMILIES else [*dict.fromkeys(map(as_planned, chosen))]
        found += meant
        told[name] = {"methods": meant, "why": f"on {depths[-1]} stages {meaning(chosen[-1])}"}
    return tuple(dict.fromkeys(found)), told


def words_told(told: Told) -> list[str]:
    """What is printed of words among a plan's methods."""
    return [f"{word} in plans: {', '.join(each['methods'])}; {each['why']}" for word, each in told.items()]


def penalty_rows(problem: Problem, objective: Objective, study: MeasuredPenalties | None) -> dict[str, Any]:
    """The penalty of each method and where it is from, as plain data, with what the study says beside them."""
    rows: list[dict[str, Any]] = []
    for name in problem.names:
        if name in objective.penalties:
            rows.append({"method": name, "factor": objective.penalties[name].factor, "is": "given"})
        elif name in objective.measured:
            for penalty in objective.measured[name]:
                row = {"method": name, "factor": penalty.factor, "error": None, **penalty.remarks, "is": penalty.source}
                rows.append({**row, "losses": penalty.losses, "delay": penalty.delay})
        elif not planned(name).drains:
            rows.append({"method": name, "factor": None, "is": "assumed"})
    facts: dict[str, Any] = {
        "critical_batch": objective.critical_batch,
        "least_steps": objective.least_steps,
        "methods": rows,
    }
    if study is not None:
        facts["study"] = {
            "loss": study.loss,
            "baseline": study.baseline,
            "seeds": study.seeds,
            "stages": study.stages,
            "never": list(study.never),
            "not_planned": list(study.unplanned),
        }
    return facts


def describe(goal: Mapping[str, Any], penalties: Mapping[str, Any]) -> list[str | list[tuple[str, ...]]]:
    """What the plan's steps to the loss are made of, and what was known of other methods."""
    plan = {key.removeprefix("penalty_"): value for key, value in goal.items()} | {"factor": goal["penalty"]}
    more = "more than " if "bound" in plan else ""
    source = f"{plan['is']}, {describe_found(plan)}" if "found" in plan else plan["is"]
    lines: list[str | list[tuple[str, ...]]] = [
        f"{more}{goal['steps']:.4g} steps to the loss: {penalties['least_steps']:.4g} x "
        f"(1 + {goal['critical_batch']:.4g} / batch size) x {describe_factor(plan)} ({source})"
    ]
    study = penalties.get("study")
    if study:
        lines.append(
            f"measured: steps to train loss {study['loss']:g} on {study['stages']} stages, against "
            f"{study['baseline']}, {study['seeds']} seed{'s' * (study['seeds'] > 1)}"
        )
    rows = penalties["methods"]
    several = {row["method"] for row in rows if sum(other["method"] == row["method"] for other in rows) > 1}
    lines += [[line_of(row, among=row["method"] in several) for row in rows]] if rows else []
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
        return name, describe_factor(row), row["is"]
    more = " or more" if "bound" in row else ""
    return name, f"{describe_found(row)}, counted as {row['factor']:.3g}{more}", row["is"]


def describe_factor(row: Mapping[str, Any]) -> str:
    """A factor with three digits, and its error; what it is above; a dash where it is assumed."""
    if row["factor"] is None:
        return "–"
    error = f" ± {row['error']:.2g}" if row.get("error") else ""
    return f"{'> ' * ('bound' in row)}{row['factor']:.3g}{error}"


def describe_found(row: Mapping[str, Any]) -> str:
    """What a study found where another factor counts."""
    return f"{'> ' * ('bound' in row)}{row['found']:.3g} found"
