"""Encodings that all charts share: color, symbol and dash by method; and their rows as inline data."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import altair as alt

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
