"""The filters of a first layer as one picture: a grid of small images."""

import math
from collections.abc import Sequence

from stretto.report.picture import checked

SIDE, GAP, COLUMNS = 72, 8, 9  # pixels, pixels, images
MOST_RECTANGLES = 9000  # of a picture: filters beyond are left out


def picture(filters: Sequence[str], shape: Sequence[int], what: str) -> str:
    """An SVG of filters: three channels are drawn as colors, of any other number the first one in grey.

    `filters` are texts of channels * height * width bytes in hexadecimal, `shape` is (channels, height, width); `what`
    names the picture in errors.
    """
    channels, height, width = shape
    size = height * width
    shown = filters[: max(1, MOST_RECTANGLES // size)]
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
