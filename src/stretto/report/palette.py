"""One color, one shape and one dash for each method, the same in all charts of a report.

The colors are Okabe and Ito's, which remain distinct for color-blind readers; backprop, the reference, is neutral grey.
Grey and all others have a contrast of at least 2 on white and on the dark page. Shapes repeat the distinction. Where
there are more methods than colors, a color returns with another shape for points and another dash for lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from stretto.methods import BASELINE
from stretto.report.record import family

NEUTRAL = "#747b87"
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8e6bbf", "#8b5e34")
HOURGLASS = "M-1,-1H1L-1,1H1Z"  # a path, which Vega takes in the place of a symbol
SHAPES = ("square", HOURGLASS, "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
DASHES = ((1, 0), (6, 3), (2, 3), (9, 3, 2, 3))
_FIXED = {"greedy": 0, "overlapping": 1, "chunked": 2, "pb": 3, "1f1b": 4, "gpipe": 5, "pipedream": 6, "pipemare": 7}
_PATHS = {
    "circle": "M10 5A5 5 0 1 1 0 5A5 5 0 1 1 10 5Z",
    HOURGLASS: "M.3.3H9.7L.3 9.7H9.7Z",
    "square": "M.7.7H9.3V9.3H.7Z",
    "diamond": "M5 -.5L9.5 5L5 10.5L.5 5Z",
    "triangle-up": "M5 0L10 9.5H0Z",
    "triangle-down": "M0 .5H10L5 10Z",
    "triangle-right": "M.5 0L10 5L.5 10Z",
    "triangle-left": "M9.5 0V10L0 5Z",
    "cross": "M3.3 0H6.7V3.3H10V6.7H6.7V10H3.3V6.7H0V3.3H3.3Z",
}


@dataclass(frozen=True)
class Style:
    """The color, symbol and dashes of a method in all charts."""

    color: str
    shape: str  # a Vega symbol, or a path in its place
    dash: tuple[int, ...] = DASHES[0]  # lengths drawn and left out, in turn

    @property
    def path(self) -> str:
        """The shape as an SVG path in a box of 10 by 10."""
        return _PATHS[self.shape]


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style for each method: its family's own color and shape, or the next free ones where two wish for the same.

    The order of the methods does not matter. Backprop is a grey circle, and nothing else is a circle. With more methods
    than colors, colors return with other shapes and dashes.
    """
    grey = next((method for method in methods if family(method) == BASELINE), None)
    chosen: dict[str, int] = {}
    others = sorted(set(methods).difference([grey]))
    first = {family(method): method for method in reversed(others) if family(method) in _FIXED}
    for method in (*first.values(), *(method for method in others if method not in first.values())):
        wish = _wish(family(method))
        near = (index for index in (*range(wish, len(COLORS)), *range(wish)) if index not in chosen.values())
        chosen[method] = next(near, len(chosen))
    return {method: Style(NEUTRAL, "circle") if method == grey else _style(chosen[method]) for method in methods}


def _wish(name: str) -> int:
    return _FIXED.get(name, crc32(name.encode()) % len(COLORS))


def _style(index: int) -> Style:
    color, again = index % len(COLORS), index // len(COLORS)
    return Style(COLORS[color], SHAPES[(color + 3 * again) % len(SHAPES)], DASHES[again % len(DASHES)])
