"""One color and one shape for each method, the same in every chart of every report.

The colors are Okabe and Ito's, which remain distinct for color-blind readers; backprop, the reference, is neutral grey.
Grey and all others have a contrast of at least 2 on white and on the dark page. Shapes repeat the distinction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.report.record import family

NEUTRAL = "#747b87"
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8e6bbf", "#8b5e34")
SHAPES = ("square", "circle", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
_FIXED = {"greedy": 0, "overlapping": 1, "chunked": 2, "pb": 3, "1f1b": 4, "gpipe": 5}
_PATHS = {
    "circle": "M10 5A5 5 0 1 1 0 5A5 5 0 1 1 10 5Z",
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
    """How a method looks."""

    color: str
    shape: str  # a Vega symbol

    @property
    def path(self) -> str:
        """The shape as an SVG path in a box of 10 by 10."""
        return _PATHS[self.shape]


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """Choose a style for each method: its family's own color, or the next free one where two share a family.

    Backprop is a grey circle. With more methods than colors, colors return with other shapes.
    """
    chosen: dict[str, Style] = {}
    used: list[int] = []
    for method in methods:
        if family(method) == "backprop" and Style(NEUTRAL, "circle") not in chosen.values():
            chosen[method] = Style(NEUTRAL, "circle")
        elif (wish := _FIXED.get(family(method))) is not None and wish not in used:
            used.append(wish)
            chosen[method] = Style(COLORS[wish], SHAPES[wish])
    free = iter([index for index in range(len(COLORS)) if index not in used] or range(len(COLORS)))
    for count, method in enumerate(method for method in methods if method not in chosen):
        index = next(free, None)
        if index is None:
            index = count % len(COLORS)
            chosen[method] = Style(COLORS[index], SHAPES[(index + 1 + count // len(COLORS)) % len(SHAPES)])
        else:
            chosen[method] = Style(COLORS[index], SHAPES[index])
    return {method: chosen[method] for method in methods}
