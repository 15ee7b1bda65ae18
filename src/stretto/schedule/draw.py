"""A schedule as a picture: one row a worker, time to the right; as text and as SVG."""

from collections.abc import Sequence
from html import escape
from statistics import median

from stretto.schedule.action import KINDS, Span

# Color-blind safe (after Okabe and Ito), dark enough for white labels.
COLORS = {
    "F": "#0072b2",
    "C": "#8a4b8f",
    "B": "#b5540b",
    "I": "#b5540b",
    "W": "#008060",
    "A": "#a0285e",
    "R": "#8a6d00",
    "U": "#5b5b66",
    "M": "#a0285e",
    "L": "#4a5fc1",
}


MOST_WORKERS, MOST_ACTIONS = 64, 128  # more of either cannot be told apart in a picture


def text(spans: Sequence[Span], unit: float | None = 1.0, width: int = 1000) -> str:
    """Draw spans whose times are multiples of `unit`, one column a unit, in lines of at most `width` characters.

    A cell names the action as stage, kind and micro-batch; "=" goes on where it takes longer than one column, "." is
    idle time. Actions that take no time are left out. Columns are narrowed until they fit, with shorter names; without
    a unit all is drawn to scale. A last line says so, and what was cut for lack of room.
    """
    shown = [span for span in spans if span.end > span.start]
    if not shown:
        return ""
    end, workers = max(span.end for span in shown), 1 + max(span.worker for span in shown)
    count = min(workers, MOST_WORKERS)
    label = len(f"worker {count - 1}")
    room = max(1, width - label - 2)
    cell = 1 + max(len(str(span.action)) for span in shown)
    if unit is not None and round(end / unit) * cell <= room:
        rows, remarks = in_columns(shown, count, unit, cell), []
    else:
        middle = median(span.end - span.start for span in shown)
        scale = max(room / end, 1 / middle) if unit is None else max(1, room // round(end / unit)) / unit
        rows, remarks = to_scale(shown, count, scale), ["to scale, with names as short as the room"]
        remarks += [f"cut: {room / scale / end:.0%} of the time is drawn"] * (room < round(end * scale))
    remarks += [f"cut: {count} of {workers} workers are drawn"] * (count < workers)
    lines = [f"{f'worker {w}':<{label}}  {row[:room]}".rstrip() for w, row in enumerate(rows)]
    return "\n".join([*lines, f"({'; '.join(remarks)})"] if remarks else lines)


def in_columns(spans: Sequence[Span], workers: int, unit: float, cell: int) -> list[str]:
    """A line for each worker, in which a `unit` of time is a column of `cell` characters."""
    rows = [list(".".ljust(cell) * round(max(span.end for span in spans) / unit)) for _ in range(workers)]
    for span in spans:
        if span.worker < workers:
            start, end = (round(time / unit) * cell for time in (span.start, span.end))
            fill = "=" if end - start > cell else " "
            rows[span.worker][start:end] = str(span.action).ljust(end - start - 1, fill) + " "
    return ["".join(row) for row in rows]


def to_scale(spans: Sequence[Span], workers: int, scale: float) -> list[str]:
    """A line for each worker, in which a unit of time has `scale` characters.

    An action that is too short for its name is shown by its kind. Where each worker has the stage of its own number,
    names are without it.
    """
    own = all(span.action.stage == span.worker for span in spans)
    length = max(1, round(max(span.end for span in spans) * scale))
    rows = [["."] * length for _ in range(workers)]
    for span in spans:
        if span.worker < workers:
            start = min(round(span.start * scale), length - 1)
            room = max(1, round(span.end * scale) - start)
            name = f"{span.action.kind}{span.action.microbatch}" if own else f"{span.action}"
            short = name if len(name) + (not own) <= room else span.action.kind
            cell = short.ljust(room - 1, "=") + " " if len(name) < room else short.ljust(room, "=")
            rows[span.worker][start : start + room] = cell
    return ["".join(row) for row in rows]


def readable(spans: Sequence[Span]) -> tuple[list[Span], str]:
    """The spans up to the time at which some worker has MOST_ACTIONS, for a picture; and a remark on what is cut."""
    shown = [span for span in spans if span.end > span.start and span.worker < MOST_WORKERS]
    ends: dict[int, list[float]] = {}
    for span in shown:
        ends.setdefault(span.worker, []).append(span.end)
    stop = min(
        (sorted(worker_ends)[MOST_ACTIONS - 1] for worker_ends in ends.values() if len(worker_ends) > MOST_ACTIONS),
        default=None,
    )
    kept = shown if stop is None else [span for span in shown if span.end <= stop]
    workers = 1 + max((span.worker for span in spans), default=0)
    cut = [f"{MOST_WORKERS} of {workers} workers"] * (workers > MOST_WORKERS)
    if stop is not None:
        cut.append(f"up to {stop:g} of {max(span.end for span in spans):g}")
    return kept, f" (cut: {', '.join(cut)})" if cut else ""


def svg(spans: Sequence[Span], *, title: str = "", width: int = 960, row: int = 34) -> str:
    """Draw spans to scale. The picture carries its own legend and hover texts and needs nothing from outside.

    A schedule that is too long for a picture is cut, and the title says where.
    """
    shown, remark = readable(spans)
    title += remark
    end = max((span.end for span in shown), default=1.0)
    workers = min(MOST_WORKERS, 1 + max((span.worker for span in spans), default=0))
    left, top = 84, 34 if title else 12
    height = top + workers * row + 40
    scale = (width - left - 12) / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title or "schedule")}" font-family="system-ui, sans-serif" font-size="12">'
    ]
    if title:
        parts.append(f'<text x="0" y="16" font-size="14" font-weight="600" fill="currentColor">{escape(title)}</text>')
    for worker in range(workers):
        y = top + worker * row
        parts.append(f'<text x="0" y="{y + row / 2 + 1:.1f}" fill="currentColor">worker {worker}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width - left - 12}" height="{row - 6}" fill="#8884" rx="3"/>')
    parts += [box(span, left + span.start * scale, top + span.worker * row, row - 6, scale) for span in shown]
    parts += legend([kind for kind in KINDS if any(span.action.kind == kind for span in shown)], left, height - 22)
    return "".join([*parts, "</svg>"])


def box(span: Span, x: float, y: float, height: float, scale: float) -> str:
    """One action: a rectangle, its label where it fits, and its description on hover."""
    kind, stage, microbatch = span.action
    wide = (span.end - span.start) * scale
    label = str(span.action) if wide > 8 * len(str(span.action)) else str(microbatch) if wide > 14 else ""
    description = (
        f"{span.action}: {KINDS[kind]} of micro-batch {microbatch} on stage {stage}, {span.start:g} to {span.end:g}"
    )
    shade = ' fill-opacity="0.75"' if kind == "I" else ""
    return (
        f'<g><title>{escape(description)}</title><rect x="{x + 0.5:.2f}" y="{y}" width="{max(wide - 1, 0.5):.2f}" '
        f'height="{height}" rx="2" fill="{COLORS[kind]}"{shade}/>'
        f'<text x="{x + wide / 2:.2f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" fill="#fff">{label}</text></g>'
    )


def legend(kinds: Sequence[str], x: float, y: float) -> list[str]:
    """A colored square and a name for each of `kinds`."""
    parts = []
    for kind in kinds:
        shade = ' fill-opacity="0.75"' if kind == "I" else ""
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{COLORS[kind]}"{shade}/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10.5}" fill="currentColor">{kind} {KINDS[kind]}</text>')
        x += 40 + 7 * len(KINDS[kind])
    return parts


RESOLUTION = 0.005  # of the time; less is the rounding of floating-point times, or nothing that anybody can use


def idle_share(share: float, digits: int = 0) -> str:
    """A bubble in per cent, "none" where it is below RESOLUTION.

    >>> idle_share(1e-12), idle_share(0.4286), idle_share(0.4286, 1)
    ('none', '43%', '42.9%')
    """
    return "none" if share < RESOLUTION else f"{share:.{digits}%}"
