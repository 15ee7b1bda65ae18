"""Which runs are worth their cost: no other run reaches the same cut-off with less of both."""

from collections.abc import Iterable, Sequence

from stretto.report.metric import Metric
from stretto.report.record import Point, Record

Cost = tuple[float, float]  # (serial FLOP, total FLOP)


def first_reaching(record: Record, metric: Metric, cutoff: float) -> Point | None:
    """Find the first evaluation at which the run is as good as the cut-off, or None if it never is.

    A run that diverges later has reached the cut-off all the same.
    """
    for point in record.points:
        value = metric.at(point)
        if value is not None and metric.reaches(value, cutoff):
            return point
    return None


def cost(point: Point) -> Cost:
    """Give what is traded on a frontier: serial compute (time) against total compute (cost), in FLOP."""
    return point.serial_flops, point.total_flops


def dominated(costs: Sequence[Cost]) -> tuple[bool, ...]:
    """For each cost, whether another is no worse in both and better in one. Of equal costs none dominates the other."""
    order = sorted(range(len(costs)), key=lambda index: costs[index])
    flags = [False] * len(costs)
    best: Cost | None = None  # the last non-dominated cost: the lowest total so far
    for index in order:
        if best is not None and costs[index][1] >= best[1] and costs[index] != best:
            flags[index] = True
        else:
            best = costs[index]
    return tuple(flags)


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """Keep the points that no other dominates, by rising serial cost. Points of equal cost all stay, in their order."""
    listed = list(points)
    kept = [point for point, flag in zip(listed, dominated([cost(point) for point in listed]), strict=True) if not flag]
    return tuple(sorted(kept, key=cost))
