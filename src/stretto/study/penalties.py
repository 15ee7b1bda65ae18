"""Penalties and the critical batch size from a finished study: steps to a loss against those of plain training.

At each batch size a method is taken at the options (the learning rate) with which it got there in the fewest steps,
mean over seeds; where it gets between two evaluations is read off the line between them. A penalty is the geometric
mean of the ratios to plain training with the same seed and batch size, its error the standard error over seeds.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from stretto.analysis.batch_tradeoff import fit
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.methods.table import METHODS, method
from stretto.options.parse import parse
from stretto.plan.clock import CLOCKS
from stretto.plan.objective import Penalty, mean_delay, num_losses
from stretto.plan.search_space import Candidate

if TYPE_CHECKING:
    from stretto.report import Record

Steps = Mapping[tuple[int, int], float]  # by batch size and seed
REPEAT = "run stretto compare"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a study says of the steps to a loss. `least_steps` and `critical_batch` are None where it does not say.

    `penalties` are by planned method, several where it was run in several ways. Methods of `never` did not get there
    (and what they are planned as); those of `unplanned` have options that are not planned, or shared workers.
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


def read_measured(folder: Path, loss: float | None = None) -> Measured:
    """What the study in a folder says. Raises UsageError where it is not finished, or says nothing."""
    from stretto.study import read_study

    study = read_study(folder)
    if study.pending:
        raise UsageError(
            f"{folder}: {len(study.pending)} of {len(study.tasks)} runs are not finished; the stretto compare that "
            "began them makes the others"
        )
    stages = study.settings.stages
    assert stages is not None, "settings of a study on the disk are resolved"
    return measured(study.records(), stages, workers=study.settings.workers, loss=loss, where=str(folder))


def measured(
    records: "Sequence[Record]", stages: int, *, workers: int | None = None, loss: float | None = None,
    where: str = "the study",
) -> Measured:  # fmt: skip
    """What finished runs on so many stages say; `loss` is chosen as the report chooses it unless it is given.

    Raises UsageError where nothing can be compared.
    """
    names = list(dict.fromkeys(record.method for record in records))
    baseline = baseline_of(names, where)
    goal = hardest(records, baseline, where) if loss is None else loss
    steps = {name: steps_to(goal, [record for record in records if record.method == name]) for name in names}
    refuse_useless(goal, steps[baseline], [record for record in records if record.method == baseline], where)
    penalties: dict[str, tuple[Penalty, ...]] = {}
    unplanned: list[str] = []
    never: dict[str, str] = {}
    for name in names:
        c = planned_as(name, stages, workers)
        if method(name).synchronous:
            continue  # plain training, by law
        if c is None:
            unplanned.append(name)
        elif found := penalty(steps[name], steps[baseline], c):
            penalties[c.method] = (*penalties.get(c.method, ()), found)
        else:
            never[name] = c.method
    means = {batch: mean(batch, steps[baseline]) for batch in sizes(steps[baseline])}
    curve = fit([(each, batch * each) for batch, each in means.items()])
    return Measured(
        loss=goal, baseline=baseline, seeds=len({seed for _, seed in steps[baseline]}), stages=stages,
        penalties=penalties, never=never, unplanned=tuple(unplanned),
        critical_batch=None if curve is None else curve.critical_batch,
        least_steps=None if curve is None else curve.min_steps,
    )  # fmt: skip


def baseline_of(names: Sequence[str], where: str) -> str:
    """Plain training, by whatever synchronous method, backprop if it is there."""
    plain = [name for name in names if method(name).synchronous]
    if not plain:
        raise UsageError(
            f"{where} has {', '.join(names) or 'no runs'}, and no backprop to compare steps with: {REPEAT} again with "
            "backprop among --methods"
        )
    return min(plain, key=lambda name: name != "backprop")


def hardest(records: "Sequence[Record]", baseline: str, where: str) -> float:
    """Of the report's cut-offs of the train loss that plain training reaches the one that most methods reach.

    Of several such the hardest.
    """
    from stretto.report import TRAIN_LOSS
    from stretto.report.cutoffs import choose

    names = {record.method for record in records}
    best: tuple[int, float] | None = None
    for cutoff in reversed(choose(records, TRAIN_LOSS)):
        reach = {name for name in names if steps_to(cutoff, [each for each in records if each.method == name])}
        if baseline in reach and (best is None or len(reach) > best[0]):
            best = len(reach), cutoff
    if best is None:
        raise UsageError(f"{where}: {baseline} never got better than it began, so no loss can be aimed at: {REPEAT} "
                         "again with other learning rates, or more --steps")  # fmt: skip
    return best[1]


def refuse_useless(goal: float, own: Steps, records: "Sequence[Record]", where: str) -> None:
    """Raise UsageError for a loss that plain training never reaches, or has when it is first looked at."""
    losses = [point.train_loss for record in records for point in record.points]
    if not own:
        raise UsageError(
            f"{where}: with no learning rate do all seeds of {records[0].method} reach a train loss of {goal:g}; its "
            f"least was {min(losses, default=math.nan):.4g}: choose a larger --loss, or run longer"
        )
    first = min(record.points[0].step for record in records if record.points)
    if min(own.values()) <= first:
        raise UsageError(
            f"{where}: {records[0].method} has a train loss of {goal:g} at its first evaluation, after {first} steps, "
            "so steps to it cannot be told apart: choose a smaller --loss"
        )


def steps_to(loss: float, records: "Sequence[Record]") -> dict[tuple[int, int], float]:
    """Of one method: {(batch size, seed): steps}, at the options with the fewest of those where all seeds arrive."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.configuration, []).append(record)
    best: dict[int, list[tuple[int, float]]] = {}
    for group in groups.values():
        found = [(record.seed, arrival(record, loss)) for record in group]
        steps = [(seed, each) for seed, each in found if each is not None]
        batch = group[0].options["batch_size"]
        if len(steps) == len(found) and (batch not in best or average(steps) < average(best[batch])):
            best[batch] = steps
    return {(batch, seed): each for batch, steps in best.items() for seed, each in steps}


def average(steps: Sequence[tuple[int, float]]) -> float:
    """Mean over seeds."""
    return fmean(each for _, each in steps)


def arrival(record: "Record", loss: float) -> float | None:
    """The step at which a run's train loss comes to `loss`, between two evaluations; None if it never does."""
    before = None
    for point in record.points:
        if point.train_loss <= loss:
            if before is None:
                return float(point.step)
            share = (before.train_loss - loss) / (before.train_loss - point.train_loss)
            return before.step + share * (point.step - before.step)
        before = point
    return None


def penalty(own: Steps, plain: Steps, c: Candidate) -> Penalty | None:
    """The mean ratio and its error; None where no run has arrived that can be compared."""
    logs: dict[int, list[float]] = {}
    for (batch, seed), steps in own.items():
        if (batch, seed) in plain:
            logs.setdefault(seed, []).append(math.log(steps / plain[batch, seed]))
    if not logs:
        return None
    by_seed = [fmean(each) for each in logs.values()]
    factor = math.exp(fmean(by_seed))
    error = factor * stdev(by_seed) / math.sqrt(len(by_seed)) if len(by_seed) > 1 else None
    return Penalty(factor, "measured", error, num_losses(c), mean_delay(c))


def planned_as(name: str, stages: int, workers: int | None) -> Candidate | None:
    """A method of a study as the planner has it; None for options that it does not plan, or stages on one worker."""
    base, written = parse(name)
    options = {**defaults(base), **written}
    for key, clock in CLOCKS.items():
        own, fixed = parse(f"{key}({clock.options})" if clock.options else key)
        free = {clock.cut, "head", "combine"}
        wanted = {**defaults(own), **fixed}
        if own == base and all(options.get(k) == wanted.get(k) for k in {*options, *wanted} - free):
            pipeline = stages // clock.chunks
            if workers not in (None, pipeline):
                return None
            count = options.get(clock.cut) if clock.cut else 1
            return Candidate(pipeline, Mesh(), 1, key, count or stages)
    return None


def defaults(name: str) -> dict[str, object]:
    """The options of a method and what they are unless said otherwise."""
    return {key: each.default for key, each in inspect.signature(METHODS[name]).parameters.items()}


def sizes(steps: Steps) -> list[int]:
    """The batch sizes, rising."""
    return sorted({batch for batch, _ in steps})


def mean(batch: int, steps: Steps) -> float:
    """Of all seeds at a batch size."""
    return fmean(each for (size, _), each in steps.items() if size == batch)
