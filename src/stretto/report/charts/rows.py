"""What every chart does alike: colors and shapes by method, data rows without numbers that JSON lacks."""

from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt

from stretto.report.palette import Style
from stretto.report.record import Record
from stretto.report.units import short


def color(styles: Mapping[str, Style]) -> alt.Color:
    """Encode the method as its color; the page has one legend for all charts."""
    scale = alt.Scale(domain=list(styles), range=[style.color for style in styles.values()])
    return alt.Color("method:N", scale=scale, legend=None)


def stroke(styles: Mapping[str, Style]) -> alt.Stroke:
    """Outline a symbol in the method's color."""
    scale = alt.Scale(domain=list(styles), range=[style.color for style in styles.values()])
    return alt.Stroke("method:N", scale=scale, legend=None)


def shape(styles: Mapping[str, Style]) -> alt.Shape:
    """Encode the method as its symbol."""
    scale = alt.Scale(domain=list(styles), range=[style.shape for style in styles.values()])
    return alt.Shape("method:N", scale=scale, legend=None)


def dash(styles: Mapping[str, Style]) -> alt.StrokeDash:
    """Draw the method's lines as its legend does."""
    scale = alt.Scale(domain=list(styles), range=[list(style.dash) for style in styles.values()])
    return alt.StrokeDash("method:N", scale=scale, legend=None)


def data(rows: Iterable[Mapping[str, Any]]) -> alt.InlineData:
    """Inline data with floats shortened to what a chart can show."""
    return alt.InlineData(
        values=[
            {key: short(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
    )


def state(record: Record) -> str:
    """How a run ended, for a tooltip."""
    return f"diverged at step {record.diverged_at}" if record.diverged else "finished"
