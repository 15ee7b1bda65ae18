"""Axes whose ends and ticks are chosen here, because Vega leaves a short logarithmic axis without a readable tick."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

GRIDS = (  # the digits that a decade's ticks may begin with, from coarse to fine
    (1.0,),
    (1.0, 3.0),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
    tuple(1 + digit / 2 for digit in range(18)),
    tuple(1 + digit / 5 for digit in range(45)),
    tuple(1 + digit / 20 for digit in range(180)),
)
LABELS = ",~g"


def log_domain(values: Sequence[float], margin: float = 0.08) -> tuple[float, float]:
    """The ends of an axis of positive values: a share `margin` of its length beyond them, at least 15 % of a value."""
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = max(margin * (high - low), 0.06)
    return 10 ** (low - pad), 10 ** (high + pad)


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers between the ends: those of the finest of a few grids that gives at most `most` ticks."""
    best: list[float] = []
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for grid in GRIDS:
        ticks = [float(f"{digit * 10.0**power:.12g}") for power in decades for digit in grid]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) > most:
            return best or inside[:: math.ceil(len(inside) / most)]  # many decades: every second or third
        best = inside
    return best


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of the smallest 1, 2 or 5 times a power of ten that gives about `most` ticks."""
    power = math.floor(math.log10((high - low) / most))
    step = next(digit * 10.0**power for digit in (1, 2, 5, 10) if (high - low) / (digit * 10.0**power) <= most)
    return [float(f"{index * step:.12g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_axis(values: Sequence[float], title: str | None, margin: float = 0.08, most: int = 7) -> dict[str, Any]:
    """The `scale`, `axis` and `title` of a logarithmic channel for these positive values."""
    low, high = log_domain(values, margin)
    return {
        "scale": alt.Scale(type="log", domain=[low, high], nice=False),
        "axis": alt.Axis(values=log_ticks(low, high, most), format=LABELS),
        "title": title,
    }


def loss_axis(
    values: Sequence[float], title: str | None, margin: float = 0.05, *, linear: bool = False
) -> dict[str, Any]:
    """The `scale`, `axis` and `title` for losses: logarithmic if all are positive and not `linear`, else linear."""
    if not linear and all(value > 0 for value in values):
        return log_axis(values, title, margin)
    return {"scale": alt.Scale(zero=False), "axis": alt.Axis(format=LABELS), "title": title}


def stage_axis(count: int) -> alt.X:
    """The x axis of `count` stages, from 0; a tick at each stage, or at every second, third, ... of more than 16."""
    axis = alt.Axis(values=list(range(0, count, 1 + count // 16)), format="d", grid=False)
    scale = alt.Scale(domain=[0, max(count - 1, 1)], nice=False, padding=10)
    return alt.X("stage:Q", title="stage", axis=axis, scale=scale)
