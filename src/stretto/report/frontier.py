"""Total compute against serial compute at one cut-off: the trade that Laskin, Metz et al. 2020 plot.

The frontier that stands first on the page is also written as pictures beside it.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, color, data, log_axis, shape, state, stroke
from stretto.report.metric import Metric
from stretto.report.page import Page
from stretto.report.palette import Style, styles
from stretto.report.panel import Arrival, Panel
from stretto.report.record import methods
from stretto.report.speedup import first_panel

PURPOSE = {
    "train_loss": "How soon the network fits its training data.",
    "train_accuracy": "The same, counted in right answers.",
    "validation_loss": "How soon it does well on data it has not seen.",
    "validation_accuracy": "The same, counted in right answers.",
    "validation_bleu": "How close its translations are to the references.",
}
OWN = {True: "A metric of yours: more is better.", False: "A metric of yours: less is better."}
TOOLTIP = (
    ("method", "method"),
    ("options", "options"),
    ("seed", "seed"),
    ("step", "at step"),
    ("train", "train loss at the next evaluation"),
    ("validation", "validation loss there"),
    ("accuracy", "validation accuracy there"),
    ("bleu", "validation BLEU there"),
    ("own", "your metrics there"),
    ("serial_text", "serial compute"),
    ("total_text", "total compute"),
    ("seconds", "seconds by the clock"),
    ("state", "this run"),
)


def section(metric: Metric, panels: Sequence[Panel], styles: Mapping[str, Style], specs: ChartSpecs) -> dict[str, Any]:
    """The part of the page on one metric: a chart for each cut-off, and the methods that do not reach it."""
    return {
        "label": metric.label,
        "heading": metric.heading,
        "purpose": PURPOSE.get(metric.name) or OWN[metric.higher],
        "panels": [
            {
                "goal": panel.goal,
                "missing": ", ".join(panel.missing),
                "lost": lost(panel),
                "place": specs.add(f"frontier-{metric.name}-{index}", frontier_chart(panel, styles)),
            }
            for index, panel in enumerate(panels)
        ],
    }


def lost(panel: Panel) -> str:
    """A sentence on the methods whose fastest run to the cut-off failed later; empty if there is none."""
    names = dict.fromkeys(arrival.record.method for arrival in panel.arrivals)
    fastest = [arrival for name in names if (arrival := panel.fastest(name)) is not None]
    told = [f"{arrival.record.method} ({arrival.lost_later})" for arrival in fastest if arrival.lost_later]
    return f"Fastest run failed later: {', '.join(told)}" if told else ""


def frontier_chart(
    panel: Panel, styles: Mapping[str, Style], height: int = 300, legend: alt.Legend | None = None
) -> alt.LayerChart | None:
    """One panel: non-dominated runs strong and joined by steps, dominated ones faint. None if no run gets there.

    The page has one legend for all charts; a chart that stands alone needs its own.
    """
    rows = frontier_rows(panel.arrivals)
    if not rows:
        return None
    x_unit = units.flop_unit(max(row["x"] for row in rows))
    y_unit = units.flop_unit(max(row["y"] for row in rows))
    for row in rows:
        row["x"], row["y"] = row["x"] / x_unit[0], row["y"] / y_unit[0]
    x = alt.X("x:Q", **log_axis([row["x"] for row in rows], f"serial compute, {x_unit[1]}"))
    y = alt.Y("y:Q", **log_axis([row["y"] for row in rows], f"total compute, {y_unit[1]}"))
    hints = [alt.Tooltip(f"{field}:N", title=title) for field, title in TOOLTIP if rows[0][field] is not None]
    base = Layer(data(rows)).encode(x=x, y=y, color=color(styles, legend))
    strong = base.transform_filter("datum.frontier")
    faint = base.transform_filter("!datum.frontier").mark_point(filled=True, size=34, opacity=0.28)
    line = strong.mark_line(interpolate="step-after", strokeWidth=2, opacity=0.85).encode(
        detail=alt.Detail("method:N"), order=alt.Order("x:Q")
    )
    finished = {"test": "datum.state == 'finished'", "value": 1}
    whole = alt.FillOpacityValue(0, condition=finished)  # hollow: it failed later
    dots = strong.mark_point(filled=True, size=90, strokeWidth=1.8, opacity=1).encode(
        fillOpacity=whole, stroke=stroke(styles)
    )
    marked = shape(styles, legend)
    layers = [faint.encode(shape=marked, tooltip=hints), line, dots.encode(shape=marked, tooltip=hints)]
    return alt.LayerChart(layer=layers, width="container", height=height)


def frontier_rows(arrivals: Sequence[Arrival]) -> list[dict[str, Any]]:
    """One row a run, by rising serial compute. Runs that cost nothing are left out: a logarithmic axis has no 0."""
    shown = [arrival for arrival in arrivals if min(arrival.at.cost) > 0]
    return [_row(arrival) for arrival in sorted(shown, key=lambda arrival: arrival.at.serial_flops)]


def _row(arrival: Arrival) -> dict[str, Any]:
    record, at, point = arrival.record, arrival.at, arrival.at.evaluation
    accuracy, bleu = point.validation_accuracy, point.validation_bleu
    return {
        "run": record.id,
        "method": record.method,
        "options": record.option_text or "–",
        "seed": record.seed,
        "step": units.number(at.step),
        "train": units.number(point.train_loss),
        "validation": units.number(point.validation_loss),
        "accuracy": None if accuracy is None else units.percent(accuracy),
        "bleu": None if bleu is None else units.bleu(bleu),
        "own": ", ".join(f"{name} {units.number(value)}" for name, value in point.metrics.items()) or None,
        "x": at.serial_flops,
        "y": at.total_flops,
        "serial_text": units.flops(at.serial_flops),
        "total_text": units.flops(at.total_flops),
        "seconds": units.seconds(at.seconds),
        "state": state(record),
        "frontier": not arrival.dominated,
    }


SVG, PNG = "frontier.svg", "frontier.png"
WIDTH, HEIGHT = 640, 380  # of the picture's plot, in pixels
SCALE = 2  # pixels of the PNG to a pixel of the SVG
LINE = 80  # characters of the title
INK, SOFT, GRID = "#1c2026", "#5b6470", "#e2e5ea"  # as on the page by day


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
    panel, names = first_panel(page.records), methods(page.records)
    legend = alt.Legend(title=None, orient="bottom", columns=4, labelLimit=300, symbolOpacity=1)
    chart = None if panel is None else frontier_chart(panel, styles(names), HEIGHT, legend)
    if panel is None or chart is None:
        return None
    hollow = "; hollow runs failed later" * any(arrival.lost_later for arrival in panel.arrivals)
    under = [f"The runs' costs at {panel.goal}: further left is faster, lower is cheaper{hollow}"]
    if panel.missing:
        under += textwrap.wrap(f"Not reached by {', '.join(panel.missing)}", LINE + 15)
    text = textwrap.wrap(page.heading.text if page.heading else page.title, LINE)
    smaller: dict[str, Any] = {"subtitleColor": SOFT, "subtitleFontSize": 12, "subtitlePadding": 5}
    title = alt.TitleParams(text, subtitle=under, anchor="start", color=INK, fontSize=15, offset=14, **smaller)
    whole = chart.properties(width=WIDTH, title=title, padding=16, background="white").configure_view(stroke=None)
    colors = dict.fromkeys(("labelColor", "titleColor"), SOFT)
    colors |= dict.fromkeys(("gridColor", "domainColor", "tickColor"), GRID)
    sizes: dict[str, Any] = {"titleFontSize": 12, "labelFontSize": 11}
    whole = whole.configure_axis(titleFontWeight="normal", **colors, **sizes)
    spec: dict[str, Any] = whole.configure_legend(labelColor=INK, labelFontSize=12, symbolSize=90).to_dict()
    return spec
