"""Penalties and the critical batch size from a finished study: the steps to a train loss, compared with plain training.

At each batch size a method counts with the options (the learning rate) that need the fewest steps, mean over seeds.
Steps are interpolated between two evaluations, as the report's arrivals are. A penalty is the geometric mean of the
ratios of steps to those of plain training with the same seed and batch size; its error is their standard error over
seeds.
"""

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from stretto.analysis.batch_tradeoff import fit
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.methods.synchronous_pipelines import BASELINE
from stretto.methods.table import builder, method
from stretto.options.import_object import refuse_functions
from stretto.options.named import parse
from stretto.plan.objective import Penalty, mean_delay, num_losses
from stretto.plan.planned_methods import PlannedMethod, catalogue
from stretto.plan.search_space import Candidate

if TYPE_CHECKING:
    from stretto.report import Record

Steps = Mapping[tuple[int, int], float]  # {(batch size, seed): steps to the loss}
REPEAT = "run stretto compare"


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


def read_penalties(folder: Path, loss: float | None = None, trusted: Collection[str] = ()) -> MeasuredPenalties:
    """Measure penalties on the study in a folder. Raises UsageError if it is unfinished or has nothing to compare.

    Functions that its settings name have to be among the `trusted` ones.
    """
    from stretto.study import read_study

    study = read_study(folder, trusted)
    if study.pending:
        raise UsageError(
            f"{folder}: {len(study.pending)} of {len(study.tasks)} runs are not finished; the stretto compare that "
            "began them makes the others"
        )
    stages = study.settings.stages
    assert stages is not None, "settings of a study on the disk are resolved"
    return measure_penalties(
        study.records(), stages, workers=study.settings.workers, loss=loss, where=str(folder), trusted=trusted
    )


def measure_penalties(
    records: "Sequence[Record]", stages: int, *, workers: int | None = None, loss: float | None = None,
    where: str = "the study", trusted: Collection[str] = (),
) -> MeasuredPenalties:  # fmt: skip
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
        planned = planned_as(name, stages, workers)
        if method(name).synchronous:
            continue  # it is plain training
        if planned is None:
            unplanned.append(name)
        elif result := penalty(steps[name], steps[baseline], planned):
            penalties[planned.method] = (*penalties.get(planned.method, ()), result)
        else:
            never[name] = planned.method
    means = {batch: mean(batch, steps[baseline]) for batch in sizes(steps[baseline])}
    curve = fit([(number, batch * number) for batch, number in means.items()])
    return MeasuredPenalties(
        loss=goal, baseline=baseline, seeds=len({seed for _, seed in steps[baseline]}), stages=stages,
        penalties=penalties, never=never, unplanned=tuple(unplanned),
        critical_batch=None if curve is None else curve.critical_batch,
        least_steps=None if curve is None else curve.min_steps,
    )  # fmt: skip


def baseline_of(names: Sequence[str], where: str) -> str:
    """The method of plain training: backprop if the study has it, else another synchronous method."""
    plain = [name for name in names if method(name).synchronous]
    if not plain:
        raise UsageError(
            f"{where} has {', '.join(names) or 'no runs'}, and no backprop to compare steps with: {REPEAT} again with "
            "backprop among --methods"
        )
    return min(plain, key=lambda name: name != BASELINE)


def hardest_cutoff(records: "Sequence[Record]", baseline: str, where: str) -> float:
    """The train loss, among the report's cut-offs that plain training reaches, that most methods reach.

    Of several, the lowest.
    """
    from stretto.report import TRAIN_LOSS
    from stretto.report.panel import choose

    names = {record.method for record in records}
    best: tuple[int, float] | None = None
    for cutoff in reversed(choose(records, TRAIN_LOSS)):
        reach = {name for name in names if steps_to(cutoff, [record for record in records if record.method == name])}
        if baseline in reach and (best is None or len(reach) > best[0]):
            best = len(reach), cutoff
    if best is None:
        raise UsageError(f"{where}: {baseline} never got better than it began, so no loss can be aimed at: {REPEAT} "
                         "again with other learning rates, or more --steps")  # fmt: skip
    return best[1]


def refuse_useless(goal: float, plain: Steps, records: "Sequence[Record]", where: str) -> None:
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


def steps_to(loss: float, records: "Sequence[Record]") -> dict[tuple[int, int], float]:
    """{(batch size, seed): steps to a loss} of one method, at the options with the fewest where all seeds reach it."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.configuration, []).append(record)
    best: dict[int, list[tuple[int, float]]] = {}
    for group in groups.values():
        arrivals = [(record.seed, arrival(record, loss)) for record in group]
        steps = [(seed, step) for seed, step in arrivals if step is not None]
        batch = group[0].options["batch_size"]
        if len(steps) == len(arrivals) and (batch not in best or average(steps) < average(best[batch])):
            best[batch] = steps
    return {(batch, seed): step for batch, steps in best.items() for seed, step in steps}


def average(steps: Sequence[tuple[int, float]]) -> float:
    """The mean over seeds of the steps in (seed, steps)."""
    return fmean(step for _, step in steps)


def arrival(record: "Record", loss: float) -> float | None:
    """The step at which a run's train loss crosses `loss`, as the report has it; None if it never does."""
    from stretto.report import TRAIN_LOSS
    from stretto.report.panel import crossing

    crossed = crossing(record, TRAIN_LOSS, loss)
    return None if crossed is None else crossed.step


def penalty(steps: Steps, plain: Steps, planned: Candidate) -> Penalty | None:
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
    return Penalty(factor, "measured", error, num_losses(planned), mean_delay(planned))


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


def sizes(steps: Steps) -> list[int]:
    """The batch sizes in rising order."""
    return sorted({batch for batch, _ in steps})


def mean(batch: int, steps: Steps) -> float:
    """The mean number of steps over the seeds at a batch size."""
    return fmean(number for (size, _), number in steps.items() if size == batch)
