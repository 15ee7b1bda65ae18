"""The quantities by which runs are compared."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.errors import UsageError, nearest
from stretto.options.checks import shown
from stretto.report.record import Point, Record


@dataclass(frozen=True)
class Metric:
    """A quantity by which runs are compared, and which direction is better.

    A user's `own` one is found by its name among the metrics of Point and of Record, any other is a field of both.
    """

    name: str
    label: str
    higher: bool  # whether more is better
    whole: float | None = 1.0  # the largest possible value, where more is better; None if nobody knows
    own: bool = False  # the user's

    @property
    def is_share(self) -> bool:
        """Whether it is written in per cent."""
        return self.higher and self.whole == 1

    @property
    def heading(self) -> str:
        """The label with a capital letter; that of a user's metric as it was written."""
        return self.label if self.own else self.label[0].upper() + self.label[1:]

    @property
    def direction(self) -> str:
        """The label, and which direction is better, for what is no loss and no accuracy."""
        return f"{self.label} ({'more' if self.higher else 'less'} is better)" if self.own else self.heading

    def at(self, point: Point) -> float | None:
        """The value at one evaluation; None where it was not evaluated."""
        value: float | None = point.metrics.get(self.name) if self.own else getattr(point, self.name)
        return value

    def final(self, record: Record) -> float | None:
        """The value at the end of a run; None for a run that failed, whatever it reached before."""
        if record.failed:
            return None
        value: float | None = record.metrics.get(self.name) if self.own else getattr(record, self.name)
        return value

    def reaches(self, value: float, cutoff: float) -> bool:
        """Whether a value is as good as the cut-off or better."""
        return value >= cutoff if self.higher else value <= cutoff

    def cost(self, value: float) -> float:
        """A key for min() and sorted(): lower is better."""
        return -value if self.higher else value


TRAIN_LOSS = Metric("train_loss", "train loss", higher=False)
TRAIN_ACCURACY = Metric("train_accuracy", "train accuracy", higher=True)
VALIDATION_LOSS = Metric("validation_loss", "validation loss", higher=False)
VALIDATION_ACCURACY = Metric("validation_accuracy", "validation accuracy", higher=True)
VALIDATION_BLEU = Metric("validation_bleu", "validation BLEU", higher=True, whole=100.0)
METRICS = (TRAIN_LOSS, TRAIN_ACCURACY, VALIDATION_LOSS, VALIDATION_ACCURACY, VALIDATION_BLEU)  # that any run may have


def metrics_of(records: Sequence[Record]) -> tuple[Metric, ...]:
    """The metrics by which these runs are compared: those that any run may have, then the user's own."""
    return (*METRICS, *own_metrics(records))


def own_metrics(records: Sequence[Record]) -> tuple[Metric, ...]:
    """The user's metrics, in the order in which they first appear; more of one is better if any record says so."""
    higher = {name for record in records for name in record.higher_is_better}
    evaluated = [held for record in records for held in (*(p.metrics for p in record.points), record.metrics)]
    names = dict.fromkeys(name for metrics in evaluated for name in metrics)
    return tuple(Metric(name, name, higher=name in higher, whole=None, own=True) for name in names)


def metric(name: str, records: Sequence[Record] = ()) -> Metric:
    """The metric with this name, also the user's own of these records. Raises UsageError for an unknown one."""
    known = {metric.name: metric for metric in metrics_of(records)}
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"no metric is called {shown(name)}: {nearest(str(name), known)}")
    return known[name]
