"""One line for each method: how good its best model is, what that costs, and how hard it is to get there."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from stretto.report.metric import METRICS, TRAIN_LOSS, VALIDATION_ACCURACY, VALIDATION_LOSS, Metric
from stretto.report.panel import first_reaching
from stretto.report.record import Record, methods

NEAR = 0.02  # "close to the best": a loss <= 1.02 x best, an accuracy >= 0.98 x best


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """The results of all runs of one method; None for what these runs cannot tell."""

    method: str
    metric: Metric  # by which runs and configurations are judged
    runs: int
    diverged: int
    learned_nothing: int
    best_train_loss: float | None  # over all runs that did not fail, at their end
    best_validation_loss: float | None
    best_validation_accuracy: float | None
    chosen: Record | None  # the run that is best on validation, of those that did not fail; the test values are its own
    serial_flops: float | None  # what the chosen run had spent when it first was as good as at its end
    total_flops: float | None
    seconds: float | None
    configurations: int
    best_configuration: tuple[Record, ...]  # its runs, one a seed
    near_best: float | None  # share of configurations whose mean over seeds is close to the best configuration's
    spread: float | None  # standard deviation over seeds at the best configuration
    median_spread: float | None  # the same at every configuration with two finished seeds or more, median

    @property
    def test_loss(self) -> float | None:
        """The test loss of the chosen run; the test data had no part in choosing it."""
        return self.chosen.test_loss if self.chosen else None

    @property
    def test_accuracy(self) -> float | None:
        """The test accuracy of the chosen run; the test data had no part in choosing it."""
        return self.chosen.test_accuracy if self.chosen else None

    @property
    def test_bleu(self) -> float | None:
        """The test BLEU of the chosen run; the test data had no part in choosing it."""
        return self.chosen.test_bleu if self.chosen else None

    @property
    def diverged_share(self) -> float:
        """Diverged runs / all runs of the method."""
        return self.diverged / self.runs

    @property
    def failed(self) -> int:
        """Runs that diverged or learned nothing."""
        return self.diverged + self.learned_nothing


def judge(records: Sequence[Record]) -> Metric:
    """The metric by which runs are chosen: validation accuracy if every finished run has one, else validation loss."""
    finished = [record for record in records if not record.diverged]
    has_accuracy = finished and all(record.validation_accuracy is not None for record in finished)
    return VALIDATION_ACCURACY if has_accuracy else VALIDATION_LOSS


def summarize(records: Sequence[Record]) -> tuple[MethodSummary, ...]:
    """Summarize every method, in the order in which the methods first appear."""
    metric = judge(records)
    return tuple(
        _method(method, tuple(record for record in records if record.method == method), metric)
        for method in methods(tuple(records))
    )


def _method(method: str, records: tuple[Record, ...], metric: Metric) -> MethodSummary:
    chosen = _best_run(records, metric)
    goal = metric.final(chosen) if chosen else None
    reached = first_reaching(chosen, metric, goal) if chosen and goal is not None else None
    spent = reached or chosen
    groups = _configurations(records)
    best = _best_configuration(groups, metric)
    spreads = [spread for group in groups if (spread := _spread(group, metric)) is not None]
    finals = {kind.name: _finals(records, kind) for kind in METRICS}
    return MethodSummary(
        method=method,
        metric=metric,
        runs=len(records),
        diverged=sum(record.diverged for record in records),
        learned_nothing=sum(record.learned_nothing for record in records),
        best_train_loss=min(finals[TRAIN_LOSS.name], default=None),
        best_validation_loss=min(finals[VALIDATION_LOSS.name], default=None),
        best_validation_accuracy=max(finals[VALIDATION_ACCURACY.name], default=None),
        chosen=chosen,
        serial_flops=spent.serial_flops if spent else None,
        total_flops=spent.total_flops if spent else None,
        seconds=spent.seconds if spent else None,
        configurations=len(groups),
        best_configuration=best,
        near_best=_near_best(groups, best, metric),
        spread=_spread(best, metric),
        median_spread=median(spreads) if spreads else None,
    )


def best_configuration(records: Sequence[Record], metric: Metric) -> tuple[Record, ...]:
    """Find the runs of the best configuration among these of one method, one a seed."""
    return _best_configuration(_configurations(tuple(records)), metric)


def _best_run(records: Sequence[Record], metric: Metric) -> Record | None:
    """Find the best run of those that did not fail; of equals that with the lower validation loss, then the first."""
    scored = [(value, record) for record in records if (value := metric.final(record)) is not None]

    def key(item: tuple[float, Record]) -> tuple[float, float]:
        loss = item[1].validation_loss
        return metric.cost(item[0]), float("inf") if loss is None else loss

    return min(scored, key=key)[1] if scored else None


def _configurations(records: Sequence[Record]) -> list[tuple[Record, ...]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.configuration, []).append(record)
    return [tuple(group) for group in groups.values()]


def _finals(group: Sequence[Record], metric: Metric) -> list[float]:
    return [value for record in group if (value := metric.final(record)) is not None]


def _all_finished(group: Sequence[Record], metric: Metric) -> bool:
    return len(_finals(group, metric)) == len(group) > 0


def _best_configuration(groups: Sequence[tuple[Record, ...]], metric: Metric) -> tuple[Record, ...]:
    """Find the best mean over seeds among configurations where no seed failed, or among all if there is none."""
    candidates = [group for group in groups if _all_finished(group, metric)]
    candidates = candidates or [group for group in groups if _finals(group, metric)]
    return min(candidates, key=lambda group: metric.cost(fmean(_finals(group, metric))), default=())


def _near_best(groups: Sequence[tuple[Record, ...]], best: tuple[Record, ...], metric: Metric) -> float | None:
    """The share of configurations close to the best one; a configuration with a failed seed never is."""
    if not _all_finished(best, metric):
        return 0.0 if best else None
    target = metric.cost(fmean(_finals(best, metric)))
    limit = target + NEAR * abs(target)
    means = [metric.cost(fmean(_finals(group, metric))) for group in groups if _all_finished(group, metric)]
    return sum(mean <= limit for mean in means) / len(groups)


def _spread(group: Sequence[Record], metric: Metric) -> float | None:
    """The sample standard deviation over finished seeds; None for a single one."""
    values = _finals(group, metric)
    return stdev(values) if len(values) > 1 else None
