"""A study's figure: each cell's ratio of arrivals with its interval, as an SVG that is drawn by hand."""

import html
import math
from collections.abc import Sequence

from harness.results import Result

LEFT, RIGHT, ROW, TOP, WIDTH = 250, 30, 22, 34, 760
INK, LINE, DOT = "#333", "#bbb", "#2a6f97"


def figure(results: Sequence[Result], bound: float | None, baseline: str = "no delay", metric: str = "loss") -> str:
    """An SVG with a row for each cell that has a ratio, on a logarithmic axis; `bound` is drawn as a line.

    `baseline` says what references are, `metric` of what the cut-off is.
    """
    shown = [(each, each.ratio) for each in results if each.ratio is not None]
    ends = [end for _, found in shown for end in (found.low, found.high) if math.isfinite(end)]
    low, high = min([0.9, *ends]) * 0.97, max([1.5, *ends]) * 1.05
    height = TOP + ROW * max(1, len(shown)) + 30

    def x(value: float) -> float:
        share = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    title = f"steps to the {metric} of {baseline} at 90 % of training, times those of {baseline}"
    parts = [_text(LEFT, 14, title, "start")]
    for value in _ticks(low, high):
        parts.append(_line(x(value), TOP - 6, x(value), height - 24, LINE))
        parts.append(_text(x(value), height - 8, f"{value:g}", "middle"))
    if bound is not None:
        parts.append(_line(x(bound), TOP - 6, x(bound), height - 24, "#b5482a", dashes="4 3"))
    for row, (each, found) in enumerate(shown):
        y = TOP + ROW * row + ROW / 2
        open_end = math.isinf(found.high)
        parts.append(_text(LEFT - 10, y + 4, each.cell.name, "end"))
        parts.append(_line(x(found.low), y, x(high) if open_end else x(found.high), y, DOT, wide=2))
        if open_end:
            parts.append(_text(x(high), y + 4, "›", "middle"))
        else:
            parts.append(f'<circle cx="{x(found.mean)}" cy="{y}" r="4" fill="{DOT}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _ticks(low: float, high: float) -> list[float]:
    steps = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50)
    return [value for value in steps if low <= value <= high]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{INK}">{html.escape(words)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, color: str, wide: int = 1, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{color}" stroke-width="{wide}"{dashed}/>'
