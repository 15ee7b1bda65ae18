"""What the charts and pictures of a page share: encodings by method, axes, inline data, and their specifications.

The ends and ticks of axes are chosen here: Vega leaves a short logarithmic axis without a readable tick.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from xml.etree import ElementTree

import altair as alt

from stretto.errors import UsageError
from stretto.report.palette import Style
from stretto.report.record import Record
from stretto.report.units import short


def color(styles: Mapping[str, Style], legend: alt.Legend | None = None) -> alt.Color:
    """A method is shown by its color; the page has one legend for all charts."""
    scale = alt.Scale(domain=list(styles), range=[style.color for style in styles.values()])
    return alt.Color("method:N", scale=scale, legend=legend)


def stroke(styles: Mapping[str, Style]) -> alt.Stroke:
    """A symbol's outline has the method's color."""
    scale = alt.Scale(domain=list(styles), range=[style.color for style in styles.values()])
    return alt.Stroke("method:N", scale=scale, legend=None)


def shape(styles: Mapping[str, Style], legend: alt.Legend | None = None) -> alt.Shape:
    """A method is shown by the symbol of its points."""
    scale = alt.Scale(domain=list(styles), range=[style.shape for style in styles.values()])
    return alt.Shape("method:N", scale=scale, legend=legend)


def dash(styles: Mapping[str, Style]) -> alt.StrokeDash:
    """A method is shown by the dashes of its line, as in the legend."""
    scale = alt.Scale(domain=list(styles), range=[list(style.dash) for style in styles.values()])
    return alt.StrokeDash("method:N", scale=scale, legend=None)


class Layer(alt.Chart):
    """A chart whose copies share its rows and channels: altair copies all of them, several times a layer."""

    def copy(self, deep: bool | Iterable[Any] = True, ignore: list[str] | None = None) -> Self:
        """Of its own are the chart and what `deep` lists: nobody changes what is shared."""
        return super().copy(deep=False if deep is True else deep, ignore=ignore)


def data(rows: Iterable[Mapping[str, Any]]) -> alt.InlineData:
    """Rows as inline data, their floats rounded to five significant digits."""
    return alt.InlineData(
        values=[
            {key: short(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
    )


def state(record: Record) -> str:
    """How a run ended, for a tooltip."""
    return record.outcome


@dataclass
class ChartSpecs:
    """The charts of a page by the id of their HTML element; data that several charts share is stored once."""

    charts: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)

    def add(self, element: str, chart: alt.LayerChart | None) -> str | None:
        """Keep a chart for the HTML element with this id and return the id; without a chart return None."""
        if chart is None:
            return None
        spec = chart.to_dict(validate=False)
        self.datasets.update(spec.pop("datasets", {}))
        spec.pop("config", None)  # the page has a light and a dark one
        self.charts[element] = spec
        return element

    def to_json(self) -> dict[str, Any]:
        """The object that the page's script reads: specifications by element id, and the data they name."""
        return {"charts": self.charts, "datasets": self.datasets}


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


_FORBIDDEN = {"script", "foreignobject", "iframe", "image", "use", "a", "audio", "video", "animate", "set", "style"}


def checked(svg: str, method: str) -> str:
    """Return the `<svg>` element of a picture. Raises UsageError if it could run or load something.

    The pictures come from `stretto.schedule.draw`, which writes shapes and text only; anything else is a mistake.
    """
    start = svg.find("<svg")
    body = svg[start:].strip() if start >= 0 else ""
    where = f"the schedule picture of {method!r}"
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise UsageError(f"{where} is no well-formed SVG ({error}); draw it again") from error
    for element in root.iter():
        name = str(element.tag).rpartition("}")[2].lower()
        if name in _FORBIDDEN:
            raise UsageError(f"{where} has a <{name}> element; a report takes shapes and text only")
        for key, value in element.attrib.items():
            attribute = key.rpartition("}")[2].lower()
            if attribute.startswith("on") or attribute in ("href", "src") or "url(" in value.replace("url(#", ""):
                raise UsageError(f"{where} has {attribute}={value!r} on <{name}>; a report loads and runs nothing")
    return body
