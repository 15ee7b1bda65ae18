"""Filters as one picture: each a small image, all in a grid."""

import math
from collections.abc import Sequence

from stretto.report.picture import checked

SIDE, GAP, COLUMNS = 72, 8, 9  # px, px, images
MOST = 9000  # rectangles of a picture: filters beyond are left out


def picture(filters: Sequence[str], shape: Sequence[int], what: str) -> str:
    """An SVG; filters of three channels are colors, of any other number their first channel in grey.

    `filters` are bytes in hexadecimal, channels x height x width each.
    """
    channels, height, width = shape
    size = height * width
    shown = filters[: max(1, MOST // size)]
    pixel = SIDE / max(height, width)
    tiles = []
    for number, text in enumerate(shown):
        left, top = (SIDE + GAP) * (number % COLUMNS), (SIDE + GAP) * (number // COLUMNS)
        values = bytes.fromhex(text)
        for place in range(size):
            grey = (values[place],) * 3
            color = (values[place], values[size + place], values[2 * size + place]) if channels == 3 else grey
            row, column = divmod(place, width)
            tiles.append(
                f'<rect x="{left + column * pixel:.2f}" y="{top + row * pixel:.2f}" width="{pixel:.2f}" '
                f'height="{pixel:.2f}" fill="#{bytes(color).hex()}"/>'
            )
    across = min(len(shown), COLUMNS) * (SIDE + GAP) - GAP
    down = math.ceil(len(shown) / COLUMNS) * (SIDE + GAP) - GAP
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" width="{across}" height="{down}" '
        f'shape-rendering="crispEdges" role="img">{"".join(tiles)}</svg>'
    )
    return checked(svg, what)
