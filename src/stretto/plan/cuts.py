"""The cut of a candidate's layers into stages: the programme that its method's closed form needs."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from stretto.cost.layer_sums import Table
from stretto.plan.closed_forms import Row, adds_fill, busiest, wait_form
from stretto.plan.objective import Rates
from stretto.plan.partition import WaitTables, partition, partition_waiting
from stretto.plan.search_space import Candidate
from stretto.plan.worker_partition import Proven, proven, worker_partition
from stretto.plan.worker_stages import WorkerStages


class BestCut(NamedTuple):
    """The bounds of a candidate's stages, its seconds of a step, and what the value of no other cut is below.

    `bounds` are None where no cut was found that fits; `least` is infinite where it is proven that there is none. It is
    the value of this cut where that is proven the best.
    """

    bounds: tuple[int, ...] | None
    seconds: float
    least: float


def best_cut(c: Candidate, rows: Sequence[Row], rates: Rates, memory: Sequence[float]) -> BestCut:
    """The cut of the least value whose stages fit into their workers' memory, in bytes.

    Where stages wait for the one above them in every turn, it is the fastest one.
    """
    if c.planning.stages_per_worker > 1:
        return cut_in_rounds(c, rows, rates, memory)
    load = [row.load for row in rows]
    if rates.busy and not c.planning.waits:
        fills = [
            times(rates.busy[c.worker_of(s)], row.busy) + (times(rates.step, row.fill) if adds_fill(c) else 0.0)
            for s, row in enumerate(rows)
        ]
        chosen = partition(scaled(load, [rates.step] * len(load)), fills)
    elif c.planning.waits:
        chosen = partition_waiting(load, [wait_tables(row) for row in rows], wait_form(c))
    else:
        chosen = partition(load, [row.fill for row in rows] if adds_fill(c) else None)
    if chosen is None:
        return BestCut(None, inf, inf)
    seconds = chosen.value if c.planning.waits or not rates.busy else seconds_of(c, rows, chosen.bounds)
    is_fastest = bool(c.planning.waits and rates.busy)  # which need not be the one of the least value
    return BestCut(chosen.bounds, seconds, -inf if is_fastest else value_of(c, rows, chosen.bounds, rates, seconds))


def wait_tables(row: Row) -> WaitTables:
    """The tables of a stage that waits for the one above it."""
    assert row.beside_wait is not None, "the method's stages wait"
    assert row.awaited is not None, "the method's stages wait"
    assert row.transits is not None, "the method's stages wait"
    return WaitTables(row.beside_wait, row.awaited, row.transits)


def cut_in_rounds(c: Candidate, rows: Sequence[Row], rates: Rates, memory: Sequence[float]) -> BestCut:
    """The cut where workers have several stages each."""
    rate = (rates.step if rates.busy else 1.0) / c.planning.stages_per_worker
    load = scaled([row.load for row in rows], [rate] * len(rows))
    used = None
    if rates.busy:
        used = scaled([row.busy for row in rows], [rates.busy[c.worker_of(s)] for s in range(len(rows))])
    found = worker_partition(in_rounds(c, rows, memory, load, used=used))
    least = found.least if rates.busy else rates.step * found.least if found.least < inf else inf
    if found.best is None:
        return BestCut(None, inf, least)
    return BestCut(found.best.bounds, seconds_of(c, rows, found.best.bounds), least)


def in_rounds(
    c: Candidate,
    rows: Sequence[Row],
    memory: Sequence[float],
    load: Sequence[Table],
    *,
    used: Sequence[Table] | None = None,
    top: Sequence[Table] | None = None,
) -> WorkerStages:
    """The stages of a candidate whose workers have several each."""
    kept, passing = [row.kept for row in rows], [row.passing for row in rows]
    return WorkerStages(load, top, used, kept, passing, memory, in_v=c.planning.order == "v")


def least_memory(c: Candidate, rows: Sequence[Row]) -> Proven:
    """The cut with the least bytes of the fullest worker, whether or not they fit."""
    if c.planning.stages_per_worker == 1:
        return proven(partition([row.bytes for row in rows]))
    unlimited, kept = [inf] * c.pipeline, [row.kept for row in rows]
    return worker_partition(in_rounds(c, rows, unlimited, kept, top=[row.passing for row in rows]))


def value_of(c: Candidate, rows: Sequence[Row], bounds: Sequence[int], rates: Rates, seconds: float) -> float:
    """The value of a cut whose step takes so many seconds, without correction."""
    spans = pairwise(bounds)
    used = sum(rates.busy[c.worker_of(s)] * float(rows[s].busy[span]) for s, span in enumerate(spans) if rates.busy)
    return rates.step * seconds + used


def scaled(tables: Sequence[Table], factors: Sequence[float]) -> list[Table]:
    """Tables times factors; each product once."""
    known: dict[tuple[int, float], Table] = {}
    for table, factor in zip(tables, factors, strict=True):
        if (id(table), factor) not in known:
            known[id(table), factor] = times(factor, table)
    return [known[id(table), factor] for table, factor in zip(tables, factors, strict=True)]


def times(factor: float, table: Table) -> Table:
    """A table times a factor, which may be 0; what is infinite stays so."""
    return table * factor if factor else np.where(np.isfinite(table), 0.0, inf)


def seconds_of(c: Candidate, rows: Sequence[Row], bounds: Sequence[int]) -> float:
    """The seconds of a step for one cut, under methods whose stages do not wait in every turn."""
    stages = list(zip(rows, pairwise(bounds), strict=True))
    fill = sum(float(row.fill[span]) for row, span in stages) if adds_fill(c) else 0.0
    return fill + busiest(c, [float(row.load[span]) for row, span in stages])[1]
