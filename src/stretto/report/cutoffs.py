"""The cut-offs of a metric: the values at which the report compares the costs of runs.

Let position 0 be the median first evaluation of all runs and position 1 the best value of any run, on a logarithmic
scale: of the loss, of the error (1 - accuracy), of 100 - BLEU. Of a user's metric of which more is better nobody knows
the largest value: its scale is linear. Let q be the position that nearly all methods (at least
four in five) reach, kept between 0.3 and 0.7. The cut-offs lie at

    q/2         halfway to what nearly all reach: where fast and rough methods shine
    q           what nearly all reach
    (q+1)/2     where some drop out
    1           what only the best reach

and are rounded to the roundest number nearby; the second and the last towards the easier side only, so that they are
still reached.
"""

import math
from collections.abc import Sequence
from statistics import median

from stretto.report.metric import Metric
from stretto.report.record import Record, methods

NEARLY_ALL = 0.8
SMALLEST_LOSS = 1e-6  # below this a float32 mean loss is noise
SMALLEST_ERROR = 1e-3  # where no run has any error left


def choose(records: Sequence[Record], metric: Metric) -> tuple[float, ...]:
    """Up to four cut-offs from easy to hard; none if no run improves on the first evaluation."""
    histories = {record.id: _badness(record, metric) for record in records}
    started = [history[0] for history in histories.values() if history]
    if not started:
        return ()
    bests = sorted(
        min(min(histories[record.id]) for record in records if record.method == method and histories[record.id])
        for method in methods(tuple(records))
        if any(histories[record.id] for record in records if record.method == method)
    )
    bounded = metric.higher and metric.whole is not None
    scale = _Scale(start=median(started), bests=tuple(bests), errors=bounded)
    chosen = scale.cutoffs() if scale.progress > 0.01 else ()
    return tuple(_value(badness, metric) for badness in chosen)


def _value(badness: float, metric: Metric) -> float:
    """The value that `_badness` made a number of which less is better."""
    if not metric.higher:
        return badness
    return -badness if metric.whole is None else float(f"{metric.whole * (1 - badness):.12g}")


def roundest(low: float, high: float, target: float) -> float:
    """The roundest number in [low, high]: of the coarsest grid (1, 2, 5 times a power of ten) the nearest to `target`.

    >>> roundest(0.043, 0.058, 0.05)
    0.05
    >>> roundest(3.76, 3.88, 3.8)
    3.8
    """
    exponent = math.floor(math.log10(max(abs(low), abs(high)))) + 1
    for power in range(exponent, exponent - 16, -1):
        for digit in (5, 2, 1):
            step = digit * 10.0**power
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if first <= last:
                return float(f"{min(max(round(target / step), first), last) * step:.12g}")
    return target


def _badness(record: Record, metric: Metric) -> list[float]:
    """The metric at each evaluation, lower being better: a loss as it is, 1 - accuracy, 1 - BLEU / 100, -f1."""
    values = [value for point in record.points if (value := metric.at(point)) is not None]
    if not metric.higher:
        return values
    whole = metric.whole
    return [-value if whole is None else round(1 - value / whole, 12) for value in values]


class _Scale:
    """Positions of values: 0 at the start, 1 at the best value; logarithmic unless losses are negative."""

    def __init__(self, start: float, bests: tuple[float, ...], errors: bool) -> None:
        positive = [best for best in bests if best > 0]
        floor = min(positive, default=SMALLEST_ERROR) / 2 if errors else SMALLEST_LOSS
        self.linear = bests[0] < 0
        self.bests = bests if self.linear or errors else tuple(max(best, floor) for best in bests)
        self.floor = floor
        self.start = self._transformed(start)
        self.end = self._transformed(self.bests[0])
        self.length = self.start - self.end
        spread = max(abs(self.start), abs(self.end)) or 1.0
        self.progress = self.length / spread if self.linear else self.length  # a share; a logarithm is one already

    def cutoffs(self) -> tuple[float, ...]:
        nearly_all = self.bests[math.ceil(NEARLY_ALL * len(self.bests)) - 1]
        q = min(max((self.start - self._transformed(nearly_all)) / self.length, 0.3), 0.7)
        return (
            self._round(q / 2, easier=q / 8, harder=q / 8),
            self._round(q, easier=q / 8, harder=0),
            self._round((q + 1) / 2, easier=(1 - q) / 8, harder=(1 - q) / 8),
            self._tightest(easier=(1 - q) / 8),
        )

    def _transformed(self, value: float) -> float:
        return value if self.linear else math.log(max(value, self.floor))

    def _value(self, position: float) -> float:
        scaled = self.start - position * self.length
        return scaled if self.linear else math.exp(scaled)

    def _round(self, position: float, easier: float, harder: float) -> float:
        return roundest(self._value(position + harder), self._value(position - easier), self._value(position))

    def _tightest(self, easier: float) -> float:
        """A value that the best method reaches, and the second best does not unless it is within 2 % of the best."""
        best, high = self.bests[0], self._value(1 - easier)
        others = [value for value in self.bests if value > best]
        if others:
            high = min(high, max(others[0] - 1e-9 * abs(others[0]), best + 0.02 * abs(best)))
        return roundest(best, max(high, best), best)
