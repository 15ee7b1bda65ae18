"""The quantities by which runs are compared."""

from dataclasses import dataclass

from stretto.errors import UsageError, nearest
from stretto.report.record import Point, Record


@dataclass(frozen=True)
class Metric:
    """A quantity by which runs are compared, and which direction is better."""

    name: str  # the field of Point and of Record
    label: str
    higher: bool  # whether more is better
    whole: float = 1.0  # the largest possible value, where more is better

    @property
    def is_share(self) -> bool:
        """Whether it is written in per cent."""
        return self.higher and self.whole == 1

    def at(self, point: Point) -> float | None:
        """The value at one evaluation; None where it was not evaluated."""
        value: float | None = getattr(point, self.name)
        return value

    def final(self, record: Record) -> float | None:
        """The value at the end of a run; None for a diverged run, whatever it reached before."""
        value: float | None = None if record.diverged else getattr(record, self.name)
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
METRICS = (TRAIN_LOSS, TRAIN_ACCURACY, VALIDATION_LOSS, VALIDATION_ACCURACY, VALIDATION_BLEU)


def metric(name: str) -> Metric:
    """The metric with this field name. Raises UsageError for an unknown one."""
    known = {metric.name: metric for metric in METRICS}
    if name not in known:
        raise UsageError(f"no metric is called {name!r}: {nearest(name, known)}")
    return known[name]
