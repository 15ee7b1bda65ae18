"""The quantities by which runs are compared."""

from dataclasses import dataclass

from stretto.errors import UsageError, nearest
from stretto.report.record import Point, Record


@dataclass(frozen=True)
class Metric:
    """A quantity that an evaluation gives, and which direction is good."""

    name: str  # the field of Point and of Record
    label: str
    higher: bool  # whether more is better
    whole: float = 1.0  # the most there can be of a higher one

    @property
    def is_share(self) -> bool:
        """Whether it reads as a percentage."""
        return self.higher and self.whole == 1

    def at(self, point: Point) -> float | None:
        """Read the value at one evaluation."""
        value: float | None = getattr(point, self.name)
        return value

    def final(self, record: Record) -> float | None:
        """Read the value at the end of a run; None for a diverged one, whatever it had reached before."""
        value: float | None = None if record.diverged else getattr(record, self.name)
        return value

    def reaches(self, value: float, cutoff: float) -> bool:
        """Whether a value is as good as the cut-off or better."""
        return value >= cutoff if self.higher else value <= cutoff

    def cost(self, value: float) -> float:
        """Give a key for min() and sorted(): lower is better."""
        return -value if self.higher else value


TRAIN_LOSS = Metric("train_loss", "train loss", higher=False)
TRAIN_ACCURACY = Metric("train_accuracy", "train accuracy", higher=True)
VALIDATION_LOSS = Metric("validation_loss", "validation loss", higher=False)
VALIDATION_ACCURACY = Metric("validation_accuracy", "validation accuracy", higher=True)
VALIDATION_BLEU = Metric("validation_bleu", "validation BLEU", higher=True, whole=100.0)
METRICS = (TRAIN_LOSS, TRAIN_ACCURACY, VALIDATION_LOSS, VALIDATION_ACCURACY, VALIDATION_BLEU)


def metric(name: str) -> Metric:
    """Find a metric by the name of its field."""
    known = {each.name: each for each in METRICS}
    if name not in known:
        raise UsageError(f"no metric is called {name!r}: {nearest(name, known)}")
    return known[name]
