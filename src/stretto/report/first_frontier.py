"""The frontier that stands first in a report, and as a picture beside it."""

import textwrap
from collections.abc import Sequence
from typing import Any

from stretto.report.metric import VALIDATION_LOSS
from stretto.report.page import Page
from stretto.report.palette import styles
from stretto.report.panel import Panel, panels
from stretto.report.record import Record, methods
from stretto.report.summary import judge

SVG, PNG = "frontier.svg", "frontier.png"
WIDTH, HEIGHT = 640, 380  # of the picture's plot, in pixels
SCALE = 2  # pixels of the PNG to a pixel of the SVG
LINE = 80  # characters of the title
INK, SOFT, GRID = "#1c2026", "#5b6470", "#e2e5ea"  # as on the page by day


def first_panel(records: Sequence[Record]) -> Panel | None:
    """The cut-off that most methods reach, of several the hardest; None if no run got better than it began.

    It is one of the metric by which runs are chosen, or of validation loss where that has none.
    """
    for metric in dict.fromkeys((judge(records), VALIDATION_LOSS)):
        found = panels(records, metric)
        if found:
            return min(reversed(found), key=lambda panel: len(panel.missing))
    return None


def pictures(page: Page) -> dict[str, bytes]:
    """The first frontier as files to share, {name: content}; none if it has no run to show."""
    import vl_convert

    spec = picture_spec(page)
    if spec is None:
        return {}
    svg = vl_convert.vegalite_to_svg(spec)
    return {SVG: svg.encode(), PNG: vl_convert.svg_to_png(svg, scale=SCALE)}


def picture_spec(page: Page) -> dict[str, Any] | None:
    """The picture in Vega-Lite: the first frontier with a title, the page's colors by day and a legend of its own."""
    import altair as alt

    from stretto.report.frontier import frontier_chart

    panel, names = first_panel(page.records), methods(page.records)
    legend = alt.Legend(title=None, orient="bottom", columns=4, labelLimit=300, symbolOpacity=1)
    chart = None if panel is None else frontier_chart(panel, styles(names), HEIGHT, legend)
    if panel is None or chart is None:
        return None
    hollow = "; hollow runs failed later" * any(arrival.lost_later for arrival in panel.arrivals)
    under = [f"The runs' costs at {panel.goal}: further left is faster, lower is cheaper{hollow}"]
    if panel.missing:
        under += textwrap.wrap(f"Not reached by {', '.join(panel.missing)}", LINE + 15)
    title = alt.TitleParams(
        text=textwrap.wrap(page.heading.text if page.heading else page.title, LINE), subtitle=under, anchor="start",
        color=INK, fontSize=15, subtitleColor=SOFT, subtitleFontSize=12, subtitlePadding=5, offset=14,
    )  # fmt: skip
    whole = chart.properties(width=WIDTH, title=title, padding=16, background="white").configure_view(stroke=None)
    spec: dict[str, Any] = whole.configure_axis(
        labelColor=SOFT, titleColor=SOFT, titleFontWeight="normal", gridColor=GRID, domainColor=GRID, tickColor=GRID,
        titleFontSize=12, labelFontSize=11,
    ).configure_legend(labelColor=INK, labelFontSize=12, symbolSize=90).to_dict()  # fmt: skip
    return spec
