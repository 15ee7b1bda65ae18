"""How fast each worker computes while all do: steady differences, and not those of a machine whose cores drift.

All processes do the same work at the same time, in rounds that are spread over a calibration. A round is longer than
the periods in which a CPU quota stops a process. A worker is slower than another only if it is in nearly all rounds:
one whose core happens to be slow for some seconds is not.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from stretto.measure.messages import SampleWork, seconds

ROUND, QUICK_ROUND = 0.25, 0.1  # seconds of a round
DIFFERENT = 1.15  # times as long as the fastest worker: from here on a worker is slower
NEARLY_ALL = 0.9  # of the rounds, in which it takes longer by half of that

Rounds = tuple[tuple[float, ...], ...]  # seconds of each worker, for each round


class SpeedRounds:
    """Rounds of equal work that all processes do together."""

    def __init__(self, group: dist.ProcessGroup, *, quick: bool) -> None:
        self._group = group
        self._times: list[tuple[float, ...]] = []
        self._work = SampleWork()
        self._number = self._work.number_in(QUICK_ROUND if quick else ROUND, group, trials=50)

    def measure(self) -> None:
        """Measure a round; all processes must come here."""
        dist.barrier(group=self._group)
        own = torch.tensor([seconds(partial(self._work, self._number))], dtype=torch.float64)
        told = [torch.zeros_like(own) for _ in range(self._group.size())]
        dist.all_gather(told, own, group=self._group)
        self._times.append(tuple(float(each) for each in told))

    @property
    def times(self) -> Rounds:
        """The rounds so far, the same on all processes."""
        return tuple(self._times)


@dataclass(frozen=True)
class WorkerTime:
    """How many times as long as the fastest a worker takes: the median over rounds, and the middle half of them.

    `longer` are the rounds in which it takes longer, by half of DIFFERENT or more, of `rounds`.
    """

    times: float
    low: float
    high: float
    longer: int
    rounds: int

    @property
    def is_slower(self) -> bool:
        """Whether it is steadily slower than the fastest."""
        return self.times >= DIFFERENT and self.longer >= NEARLY_ALL * self.rounds


def worker_times(rounds: Rounds) -> list[WorkerTime]:
    """What the rounds say of each worker, compared round by round with the one whose median is least."""
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    fastest = medians.index(min(medians))
    found = []
    for column in zip(*rounds, strict=True):
        ratios = [own / each[fastest] for own, each in zip(column, rounds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        longer = sum(ratio >= 1 + (DIFFERENT - 1) / 2 for ratio in ratios)
        found.append(WorkerTime(middle, low, high, longer, len(ratios)))
    return found


def speeds_of(rounds: Rounds) -> tuple[float, ...] | None:
    """The speed of each worker in that of the first; None if no worker is steadily slower than another."""
    if len(rounds) < 2:
        return None
    times = [each.times if each.is_slower else 1.0 for each in worker_times(rounds)]
    return None if max(times) == 1 else tuple(round(times[0] / each, 3) for each in times)


def in_words(rounds: Rounds) -> str:
    """How the workers differ, and how steadily."""
    times = worker_times(rounds)
    words = [
        f"worker {index} takes {each.times:.2f} times as long as the fastest (middle half of the rounds: "
        f"{each.low:.2f} to {each.high:.2f}; longer in {each.longer} of {each.rounds})"
        for index, each in enumerate(times)
        if (each.low, each.high) != (1, 1)
    ]
    slower = "" if any(each.is_slower for each in times) else ", none steadily slower than another"
    return f"measured by stretto calibrate while all compute{slower}{': ' * bool(words)}{'; '.join(words)}"


def mean_time(speeds: Sequence[float]) -> float:
    """How many times as long as the first worker all of them take, the mean."""
    return statistics.fmean(1 / speed for speed in speeds)
