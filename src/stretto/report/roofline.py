"""The roofline of a device with the layers of a model in it (Williams, Waterman and Patterson 2009), as SVG.

FLOP/s against FLOPs a byte, both logarithmic. No pass is faster than the peak, or than its bytes at the memory's
bandwidth times its FLOPs a byte, if it finds none of them in a cache. A pass that is far below both waits for something
else: for kernels to start, or for operators that have few FLOPs. Bytes are those that operators read and write.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from stretto.cost.attained import dtype_of_products
from stretto.cost.layer_table import Kind, ModelCosts
from stretto.cost.stage_prediction import Machine, layer_seconds
from stretto.report.units import duration, flops, number, percent
from stretto.schedule.action import KINDS
from stretto.schedule.draw import COLORS

WIDTH, HEIGHT = 760, 460  # pixels
LEFT, RIGHT, TOP, BOTTOM = 92, 24, 40, 74
RADIUS, LETTER, LINE = 4.5, 6.6, 12
INK, PAPER, GRID = "#263238", "#ffffff", "#cfd8dc"  # alike on pages of any color
DIRECTIONS: tuple[Kind, ...] = ("F", "B")  # of passes


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """A forward (F) or backward (B) of a layer: its FLOPs, the bytes that it reads and writes, its seconds."""

    layer: str
    kind: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte; infinite without bytes."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def attained(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bounds of a device, FLOP/s and bytes/s, and the passes of a model's layers on a micro-batch of `examples`.

    `drawn` are the passes that have FLOPs, bytes and a time: an axis of a logarithm has no 0.
    """

    title: str
    peak: float
    bandwidth: float
    passes: tuple[LayerPass, ...]

    @classmethod
    def of(cls, title: str, costs: ModelCosts, names: Sequence[str], machine: Machine, examples: float) -> "Roofline":
        """That of a model, whose layers have these names; rows behind them are the loss. Times are those of a plan."""
        passes = [
            LayerPass(
                layer=names[i] if i < len(names) else "loss",
                kind=kind,
                flops=layer.flops(kind).at(examples),
                bytes=sum(work.bytes.at(examples) for work in layer.works(kind)),
                seconds=layer_seconds(layer, kind, machine, examples),
            )
            for i, layer in enumerate(costs.layers)
            for kind in DIRECTIONS
        ]
        device = machine.device
        peak = device.peak_of(dtype_of_products(machine.dtype))
        return cls(title=title, peak=peak, bandwidth=device.memory_bandwidth, passes=tuple(passes))

    @property
    def ridge(self) -> float:
        """The FLOPs a byte at which both bounds meet."""
        return self.peak / self.bandwidth

    @property
    def drawn(self) -> list[LayerPass]:
        """The passes that can be drawn."""
        return [each for each in self.passes if min(each.flops, each.bytes, each.seconds) > 0]

    def bound(self, intensity: float) -> float:
        """The most FLOP/s at so many FLOPs a byte."""
        return min(self.peak, self.bandwidth * intensity)

    def facts(self) -> dict[str, Any]:
        """What the picture shows, as plain data. Shares are of the time of all passes, those not drawn included."""
        total = sum(each.seconds for each in self.passes)
        below = sum(each.seconds for each in self.drawn if each.intensity < self.ridge)
        least = sum(max(each.flops / self.peak, each.bytes / self.bandwidth) for each in self.passes)
        return {
            "peak": self.peak,
            "memory_bandwidth": self.bandwidth,
            "ridge": self.ridge,
            "left_of_ridge": below / total if total else 0.0,
            "not_drawn": 1 - sum(each.seconds for each in self.drawn) / total if total else 0.0,
            "of_the_bounds": least / total if total else 0.0,
            "passes": [
                {**vars(each), "bound": self.bound(each.intensity), "attained": each.attained} for each in self.drawn
            ],
        }


def sentence(facts: Mapping[str, Any]) -> str:
    """What `stretto plan` prints of the facts."""
    rest = f", {percent(facts['not_drawn'], 0)} have no FLOPs" if facts["not_drawn"] > 0.005 else ""
    return (
        f"roofline: {percent(facts['left_of_ridge'], 0)} of the layers' time is left of the ridge at "
        f"{number(facts['ridge'])} FLOPs a byte{rest}; at its bounds the device would take "
        f"{percent(facts['of_the_bounds'], 0)} of the time; drawn in {facts['file']}"
    )


def decades(values: Sequence[float]) -> tuple[int, int]:
    """The exponents of the powers of ten around values."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def svg(roofline: Roofline) -> str:
    """The picture, which needs nothing from outside: bounds, and a point for each pass, with its figures on hover."""
    drawn = roofline.drawn
    across = decades([roofline.ridge / 3, roofline.ridge * 3, *(each.intensity for each in drawn)])
    up = decades([roofline.peak / 10, roofline.peak * 1.2, *(each.attained for each in drawn)])

    def x_of(intensity: float) -> float:
        return LEFT + (math.log10(intensity) - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(speed: float) -> float:
        return TOP + (up[1] - math.log10(speed)) / (up[1] - up[0]) * (HEIGHT - TOP - BOTTOM)

    size = min(14.0, (WIDTH - 16) / (0.62 * len(roofline.title)))  # a long title fits, too
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(roofline.title)}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>'
        f'<text x="8" y="20" font-size="{size:.1f}" font-weight="600" fill="{INK}">{escape(roofline.title)}</text>',
    ]
    foot, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    for power in range(across[0], across[1] + 1):
        x = x_of(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP}V{foot}" stroke="{GRID}"/>')
        parts.append(written(f"{10.0**power:g}", x, foot + 17, "middle"))
    for power in range(up[0], up[1] + 1):
        y = y_of(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(written(f"{flops(10.0**power)}/s", LEFT - 8, y + 4, "end"))
    parts.append(written("FLOPs a byte", middle, foot + 36, "middle"))
    start = max(10.0 ** across[0], 10.0 ** up[0] / roofline.bandwidth)
    left, ridge, low, top = x_of(start), x_of(roofline.ridge), y_of(roofline.bound(start)), y_of(roofline.peak)
    parts.append(
        f'<path class="bounds" d="M{left:.2f} {low:.2f}L{ridge:.2f} {top:.2f}H{WIDTH - RIGHT}" fill="none" '
        f'stroke="{INK}" stroke-width="1.6"/>'
    )
    parts.append(written(f"peak {flops(roofline.peak)}/s", WIDTH - RIGHT, top - 7, "end"))
    parts.append(
        written(f"memory {number(roofline.bandwidth / 1e9)} GB/s", (left + ridge) / 2 - 8, (low + top) / 2 - 6, "end")
    )
    places = [(each, x_of(each.intensity), y_of(each.attained)) for each in drawn]
    parts += [point(each, x, y, roofline) for each, x, y in places]
    parts += labels(places)
    for index, kind in enumerate(DIRECTIONS):
        x = LEFT + 100 * index
        parts += [shape(kind, x + RADIUS, HEIGHT - 16), written(KINDS[kind], x + 15, HEIGHT - 12)]
    return "".join([*parts, "</svg>"])


def written(text: str, x: float, y: float, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def shape(kind: str, x: float, y: float) -> str:
    """A circle for a forward, a square for a backward."""
    if kind == "F":
        return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{RADIUS}" fill="{COLORS[kind]}" fill-opacity="0.8"/>'
    corner = f'x="{x - RADIUS:.2f}" y="{y - RADIUS:.2f}" width="{2 * RADIUS}" height="{2 * RADIUS}"'
    return f'<rect {corner} fill="{COLORS[kind]}" fill-opacity="0.8"/>'


def point(each: LayerPass, x: float, y: float, roofline: Roofline) -> str:
    """The mark of a pass, and its figures on hover."""
    share = percent(each.attained / roofline.bound(each.intensity), 0)
    told = (
        f"{each.layer}, {KINDS[each.kind]}: {duration(each.seconds)}, {number(each.intensity)} FLOPs a byte, "
        f"{flops(each.attained)}/s, {share} of the bound"
    )
    return f"<g><title>{escape(told)}</title>{shape(each.kind, x, y)}</g>"


def labels(places: Sequence[tuple[LayerPass, float, float]]) -> Iterator[str]:
    """Yield the names of layers beside their points, the longest passes first, as far as there is room."""
    taken = [(x - RADIUS, x + RADIUS, y) for _, x, y in places]
    for each, x, y in sorted(places, key=lambda place: -place[0].seconds):
        start, end = x + RADIUS + 3, x + RADIUS + 3 + LETTER * len(each.layer)
        if end < WIDTH and all(end < left or start > right or abs(y - other) > LINE for left, right, other in taken):
            taken.append((start, end, y))
            yield written(each.layer, start, y + 4)
