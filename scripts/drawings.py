"""Draws the pictures of README and of the pages on concepts into docs/drawings: python scripts/drawings.py.

The timelines are those that `stretto show` prints, so a picture cannot differ from the schedule. A test holds the
committed files to what this script draws.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "drawings"
INK, GRAY, PALE, PAPER = "#263238", "#78909c", "#eceff1", "#ffffff"
WORKERS = ("#5c6bc0", "#26a69a", "#ffa726", "#ec407a")  # one colour a worker, or a stage
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


class Canvas:
    """An SVG that is built from top to bottom; all lengths are in pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        text: str = "",
        size: int = 12,
        color: str = PAPER,
        outline: str = "none",
        round_by: float = 4,
        dashed: bool = False,
    ) -> None:
        """A rectangle, with a text in its middle."""
        dashes = " stroke-dasharray='4 3'" if dashed else ""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{round_by:g}' fill='{fill}' "
            f"stroke='{outline}'{dashes}/>"
        )
        if text:
            self.text(x + width / 2, y + height / 2 + size * 0.35, text, size=size, color=color, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """One line of text; y is its base line."""
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{color}' text-anchor='{anchor}'{weight}>"
            f"{escape(text)}</text>"
        )

    def lines(
        self, x: float, y: float, lines: Sequence[str], *, size: int = 12, color: str = INK, anchor: str = "start"
    ) -> None:
        """Lines of text below each other."""
        for number, line in enumerate(lines):
            self.text(x, y + number * size * 1.4, line, size=size, color=color, anchor=anchor)

    def arrow(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str = GRAY,
        both: bool = False,
        width: float = 1.6,
        dashed: bool = False,
    ) -> None:
        """An arrow along points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        ends = f" marker-end='url(#head-{color[1:]})'" + (f" marker-start='url(#head-{color[1:]})'" if both else "")
        dashes = " stroke-dasharray='4 3'" if dashed else ""
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='{width:g}'{dashes}{ends}/>"
        )

    def svg(self) -> str:
        """The whole file."""
        body = "\n".join(self.parts)
        heads = "".join(
            f"<marker id='head-{color}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto-start-reverse'><path d='M0 0 L8 4 L0 8 z' fill='#{color}'/></marker>"
            for color in sorted(set(re.findall(r"#head-(\w+)", body)))
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width:g} {self.height:g}' "
            f"width='{self.width:g}' height='{self.height:g}' {FONT} role='img'>\n"
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f"<rect width='100%' height='100%' rx='8' fill='{PAPER}'/>\n{body}\n</svg>\n"
        )


# -- timelines --------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One action on a worker's timeline; its start and length are in columns, the time of one forward."""

    kind: str
    stage: int
    microbatch: int
    start: int
    length: int


def show(method: str, microbatches: int, stages: int = 4) -> list[list[Cell]]:
    """The timeline of each worker, read from what `stretto show` prints."""
    command = [
        sys.executable,
        "-m",
        "stretto",
        "show",
        method,
        "--stages",
        str(stages),
        "--microbatches",
        str(microbatches),
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [list(cells(line)) for line in re.findall(r"^worker \d+\s+(.*)$", printed, re.MULTILINE)]


def cells(line: str) -> Iterator[Cell]:
    """The actions of a line such as `0F0 .   0B0==== 0F1`: a backward is two columns wide."""
    start = 0
    for word in line.split():
        if word != ".":
            found = re.fullmatch(r"(\d+)([A-Z])(\d+)=*", word)
            assert found, word
            length = 2 if found[2] == "B" else 1
            yield Cell(found[2], int(found[1]), int(found[3]), start, length)
        start += 2 if "B" in word else 1


def idle(rows: list[list[Cell]], columns: int) -> float:
    """The share of `columns` in which a worker does nothing, over all workers."""
    busy = sum(max(0, min(cell.start + cell.length, columns) - cell.start) for row in rows for cell in row)
    return 1 - busy / (columns * len(rows))


def timeline(
    canvas: Canvas, x: float, y: float, rows: list[list[Cell]], columns: int, column: float, height: float
) -> None:
    """Draw the first columns of a timeline: a forward is light, a backward dark, an idle worker pale."""
    for number, row in enumerate(rows):
        top = y + number * (height + 4)
        canvas.box(x, top, columns * column, height, PALE, round_by=2)
        for cell in row:
            if cell.start + cell.length <= columns:
                color = WORKERS[number % len(WORKERS)]
                opacity = 0.45 if cell.kind == "F" else 1
                canvas.parts.append(
                    f"<rect x='{x + cell.start * column + 0.5:g}' y='{top:g}' width='{cell.length * column - 1:g}' "
                    f"height='{height:g}' rx='2' fill='{color}' opacity='{opacity}'/>"
                )
                canvas.text(
                    x + (cell.start + cell.length / 2) * column,
                    top + height / 2 + 4,
                    str(cell.microbatch),
                    size=11,
                    color=INK if cell.kind == "F" else PAPER,
                    anchor="middle",
                )


def timelines() -> str:
    """Four methods on four workers over the same time: the picture of README."""
    methods = (
        ("backprop", "Backpropagation: one worker at a time"),
        ("1f1b", "1F1B pipeline, 8 micro-batches: the same gradients, a bubble at every update"),
        ("pb", "Pipelined Backpropagation: no bubble, stale gradients"),
        ("greedy", "Greedy local updates: no bubble, a loss at every stage"),
    )
    columns, column, height = 33, 22.0, 20.0
    canvas = Canvas(columns * column + 190, 60 + len(methods) * 140, "What four workers do under four methods")
    canvas.text(20, 28, "Four workers, four methods, the same time", size=17, bold=True)
    canvas.text(
        20,
        48,
        "Light: forward. Dark: backward, twice as long. The number: minibatch or micro-batch. Pale: waiting.",
        color=GRAY,
    )
    for number, (method, title) in enumerate(methods):
        y = 72 + number * 140
        many = 8 if method in ("1f1b", "backprop") else 24  # more would not fit into a line of show
        rows = show(method, many)
        canvas.text(20, y + 10, title, size=13, bold=True)
        for worker in range(4):
            canvas.text(20, y + 33 + worker * 24, f"worker {worker}", size=11, color=GRAY)
        timeline(canvas, 76, y + 19, rows, columns, column, height)
        canvas.text(76 + columns * column + 8, y + 58, f"{idle(rows, columns):.0%} idle", size=12, color=GRAY)
        if method in ("pb", "greedy"):
            canvas.text(76 + columns * column + 8, y + 75, "then 0%", size=12, color=GRAY)
    return canvas.svg()


def turn() -> str:
    """A schedule is one turn that repeats: Pipelined Backpropagation on four workers, one turn marked."""
    columns, column, height, marked = 27, 26.0, 22.0, 6
    rows = show("pb", 20)
    canvas = Canvas(columns * column + 100, 270, "The turn of Pipelined Backpropagation")
    canvas.text(20, 28, "Pipelined Backpropagation, four stages: turn 6 is marked", size=17, bold=True)
    for worker in range(4):
        canvas.text(20, 66 + worker * 26, f"worker {worker}", size=11, color=GRAY)
    timeline(canvas, 76, 50, rows, columns, column, height)
    for worker, row in enumerate(rows):
        for cell in row:
            due = marked if cell.kind == "F" else marked - 2 * (3 - worker)
            if cell.microbatch == due and cell.start + cell.length <= columns:
                canvas.box(
                    76 + cell.start * column,
                    49 + worker * 26,
                    cell.length * column,
                    height + 2,
                    "none",
                    outline=INK,
                    round_by=3,
                )
    canvas.text(20, 180, "The body, written once. n is the minibatch that enters:", size=13, bold=True)
    for worker in range(4):
        back = 2 * (3 - worker)
        behind = f"n-{back}" if back else "n"
        canvas.text(20, 202 + worker * 18, f"worker {worker}:  forward of n, backward of {behind}, update", size=12)
    canvas.text(400, 202, "An action whose minibatch has not entered yet is skipped:", size=12, color=GRAY)
    canvas.text(400, 220, "so the pipeline fills and drains without further rules.", size=12, color=GRAY)
    canvas.text(400, 238, "Delay of a stage: the updates between its forward and its", size=12, color=GRAY)
    canvas.text(400, 256, "backward of one minibatch. Here 6, 4, 2, 0.", size=12, color=GRAY)
    return canvas.svg()


# -- kinds of parallelism ----------------------------------------------------------------------------------------------


def parallelism() -> str:
    """Data, model, pipeline and local parallelism side by side, after figure 1 of Laskin, Metz et al. 2020."""
    width, top, layer, gap = 264.0, 96.0, 40.0, 26.0
    canvas = Canvas(4 * width + 20, 470, "Data, model, pipeline and local parallelism")
    canvas.text(20, 30, "Four ways to share the training of one network", size=17, bold=True)
    canvas.text(
        20,
        50,
        "Four layers; a colour is a worker. Gray arrows: activations, up. Red arrows: gradients, down.",
        color=GRAY,
    )
    red = "#c62828"
    tops = [top + (3 - number) * (layer + gap) for number in range(4)]  # of layer 0 at the bottom to layer 3
    bottom = tops[0] + layer

    def stack(x: float, box_width: float, colors: Sequence[str], *, down: bool, text: str = "layer {}") -> None:
        for number, color in enumerate(colors):
            canvas.box(x, tops[number], box_width, layer, color, text=text.format(number))
            if number:
                canvas.arrow(
                    [(x + box_width * 0.3, tops[number - 1] - 2), (x + box_width * 0.3, tops[number] + layer + 3)]
                )
                if down:
                    canvas.arrow(
                        [(x + box_width * 0.7, tops[number] + layer + 2), (x + box_width * 0.7, tops[number - 1] - 3)],
                        color=red,
                    )

    def panel(number: int, title: str, lines: Sequence[str]) -> float:
        x = 20 + number * width
        canvas.text(x, 80, title, size=14, bold=True)
        canvas.lines(x, bottom + 52, lines, size=12, color=INK)
        return x

    x = panel(
        0,
        "(a) data",
        [
            "Each worker has the whole network",
            "and a part of the minibatch.",
            "They add up their gradients",
            "before every update.",
        ],
    )
    for worker in range(2):
        stack(x + worker * 120, 90, [WORKERS[worker]] * 4, down=True)
        canvas.text(x + worker * 120 + 45, bottom + 26, f"part {worker} of x", size=11, color=GRAY, anchor="middle")
        canvas.arrow([(x + worker * 120 + 27, bottom + 14), (x + worker * 120 + 27, bottom + 3)])
    for number in range(4):
        canvas.arrow([(x + 93, tops[number] + 20), (x + 117, tops[number] + 20)], color=red, both=True)

    x = panel(
        1,
        "(b) model",
        [
            "Each layer is cut: its weights (tensor)",
            "or its images (space). The workers of a",
            "layer exchange parts of its output and",
            "of its gradient, in every layer.",
        ],
    )
    for worker in range(2):
        stack(x + worker * 115, 80, [WORKERS[worker]] * 4, down=True, text="half of {}")
        canvas.arrow([(x + worker * 115 + 24, bottom + 14), (x + worker * 115 + 24, bottom + 3)])
    for number in range(4):
        canvas.arrow([(x + 83, tops[number] + 13), (x + 112, tops[number] + 13)], both=True)
        canvas.arrow([(x + 83, tops[number] + 27), (x + 112, tops[number] + 27)], color=red, both=True)
    canvas.text(x + 81, bottom + 26, "x", size=11, color=GRAY, anchor="middle")

    x = panel(
        2,
        "(c) pipeline",
        [
            "Each worker has a stage. Activations go",
            "up, gradients come back down: workers",
            "wait (a bubble), or work with gradients",
            "that are some updates old.",
        ],
    )
    stack(x + 30, 110, WORKERS, down=True)
    canvas.text(x + 63, bottom + 26, "micro-batches of x", size=11, color=GRAY, anchor="middle")
    canvas.arrow([(x + 63, bottom + 14), (x + 63, bottom + 3)])
    canvas.text(x + 150, tops[3] + 24, "loss", size=12)

    x = panel(
        3,
        "(d) local",
        [
            "Each worker has a stage and a loss of",
            "its own, on an auxiliary head. Only",
            "activations travel: nobody waits for a",
            "gradient, and none is old.",
        ],
    )
    stack(x, 110, WORKERS, down=False)
    for number in range(4):
        canvas.box(
            x + 135,
            tops[number] + 7,
            56,
            26,
            PAPER,
            text="head" if number < 3 else "output",
            size=11,
            color=INK,
            outline=GRAY,
        )
        canvas.arrow([(x + 111, tops[number] + 12), (x + 133, tops[number] + 14)])
        canvas.arrow([(x + 134, tops[number] + 27), (x + 113, tops[number] + 29)], color=red)
        canvas.text(x + 195, tops[number] + 24, "loss", size=11)
    canvas.text(x + 33, bottom + 26, "x", size=11, color=GRAY, anchor="middle")
    canvas.arrow([(x + 33, bottom + 14), (x + 33, bottom + 3)])
    return canvas.svg()


def reach() -> str:
    """How far the gradient of each head travels, after figure 2 of Laskin, Metz et al. 2020."""
    panels = (
        ("backprop", "hops (-, -, -, 3)", (None, None, None, 3)),
        ("greedy", "hops (0, 0, 0, 0)", (0, 0, 0, 0)),
        ("overlapping", "hops (-, 1, 1, 1)", (None, 1, 1, 1)),
        ("chunked(chunks=2)", "hops (-, 1, -, 1)", (None, 1, None, 1)),
    )
    width, layer, gap, top = 250.0, 40.0, 22.0, 96.0
    tops = [top + (3 - number) * (layer + gap) for number in range(4)]
    canvas = Canvas(4 * width + 20, 370, "Reach: how far the gradient of each head travels")
    canvas.text(20, 30, "Reach: which stages a head's gradient trains", size=17, bold=True)
    canvas.text(
        20, 50, "Four stages. A coloured line starts at a head and trains every stage that it passes.", color=GRAY
    )
    for number, (title, hops_text, hops) in enumerate(panels):
        x = 20 + number * width
        canvas.text(x, 80, title, size=14, bold=True)
        for stage in range(4):
            canvas.box(x, tops[stage], 100, layer, PALE, outline="#b0bec5")
            canvas.text(x + 8, tops[stage] + 24, f"stage {stage}")
            if stage:
                canvas.arrow([(x + 22, tops[stage - 1] - 2), (x + 22, tops[stage] + layer + 3)])
        for stage, hop in enumerate(hops):
            if hop is None:
                continue
            color, lane = WORKERS[stage], x + 66 + 16 * (stage % 2)
            canvas.box(x + 130, tops[stage] + 6, 66, 28, color, text="output" if stage == 3 else "head", size=11)
            end = tops[stage - hop] + layer - 6
            start = tops[stage] + (12 if hop else 14)
            canvas.arrow([(x + 130, start), (lane, start), (lane, end)], color=color, width=2.4)
        canvas.text(x, tops[0] + layer + 26, hops_text, size=12, color=GRAY)
    return canvas.svg()


def rules() -> str:
    """What the actions of one micro-batch need and make, for three stages with one loss at the top."""
    canvas = Canvas(860, 400, "Rules: what each action needs and makes")
    canvas.text(20, 30, "Rules: what each action needs and what it makes", size=17, bold=True)
    canvas.text(
        20,
        50,
        "One micro-batch through three stages. An arrow is a value; the action at its head waits for it.",
        color=GRAY,
    )
    xs, names = [150.0, 370.0, 590.0], ("F", "B", "U")
    tops = {"F": 100.0, "B": 210.0, "U": 320.0}
    red = "#c62828"
    for name, label in zip(names, ("forward", "backward", "update"), strict=True):
        canvas.text(20, tops[name] + 28, label, size=13, bold=True)
        for stage, x in enumerate(xs):
            canvas.box(x, tops[name], 90, 44, WORKERS[stage], text=f"{stage}{name}0", size=15)
    canvas.text(100, 86, "loader", size=12, color=GRAY, anchor="middle")
    canvas.arrow([(100, 92), (100, 122), (147, 122)])
    canvas.text(94, 106, "activation", size=11, color=GRAY, anchor="end")
    for left, right in ((0, 1), (1, 2)):
        canvas.arrow([(xs[left] + 92, 122), (xs[right] - 3, 122)])
        canvas.text(xs[left] + 155, 114, "activation", size=11, color=GRAY, anchor="middle")
        canvas.arrow([(xs[right] - 2, 232), (xs[left] + 93, 232)], color=red)
        canvas.text(xs[left] + 155, 224, "gradient", size=11, color=red, anchor="middle")
    for x in xs:
        canvas.arrow([(x + 45, 146), (x + 45, 207)])
        canvas.text(x + 52, 180, "graph", size=11, color=GRAY)
        canvas.arrow([(x + 45, 256), (x + 45, 317)], color=red)
        canvas.text(x + 52, 290, "weight gradient", size=11, color=red)
    canvas.text(xs[2] + 45, 74, "target, from the loader", size=11, color=GRAY, anchor="middle")
    canvas.arrow([(xs[2] + 45, 79), (xs[2] + 45, 97)])
    canvas.arrow([(xs[2] + 92, 122), (xs[2] + 130, 122)])
    canvas.text(xs[2] + 136, 126, "loss, to the caller", size=11, color=GRAY)
    canvas.text(
        20,
        388,
        "A stage whose backward is split has I (input gradient) and W (weight gradient) in the place of B.",
        size=12,
        color=GRAY,
    )
    return canvas.svg()


def interpreters() -> str:
    """One schedule, three programs that read it."""
    canvas = Canvas(860, 250, "One schedule, three interpreters")
    canvas.box(20, 80, 190, 90, "#eef1fb", outline=WORKERS[0])
    canvas.text(115, 108, "a schedule and its rules", size=13, anchor="middle", bold=True)
    canvas.lines(
        115, 130, ["which worker does what,", "in which order; no tensors"], size=12, color=GRAY, anchor="middle"
    )
    rows = (
        ("simulate", "step time, bubble, memory, messages", "needs: times of the stages, a cluster"),
        ("emulate", "exact numbers on one device, delays included", "needs: the model"),
        ("runtime", "real processes over torch.distributed", "needs: the model, one process a worker"),
    )
    for number, (name, gives, needs) in enumerate(rows):
        y = 20 + number * 76
        canvas.box(320, y, 520, 60, "#f7f8fa", outline="#b0bec5")
        canvas.text(340, y + 35, name, size=15, bold=True)
        canvas.text(450, y + 26, gives, size=13)
        canvas.text(450, y + 46, needs, size=12, color=GRAY)
        canvas.arrow([(212, 125), (266, 125), (266, y + 30), (317, y + 30)])
    return canvas.svg()


DRAWINGS = (timelines, parallelism, reach, turn, rules, interpreters)


def main() -> None:
    """Write every drawing."""
    FOLDER.mkdir(exist_ok=True)
    for draw in DRAWINGS:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw())


if __name__ == "__main__":
    main()
