"""The section on timelines: what workers did in a few turns, and what they would do on paper."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts.timeline import timeline_chart
from stretto.report.turns import Timelines

Place = Callable[[str, alt.LayerChart | None], str | None]  # keeps a chart under a name


def section(shown: Sequence[Timelines], place: Place) -> list[dict[str, Any]]:
    """All that the section says, run by run. A run's two charts have one scale of time, unless it was emulated."""
    return [_of_run(each, index, place) for index, each in enumerate(shown)]


def _of_run(each: Timelines, index: int, place: Place) -> dict[str, Any]:
    windows = {"measured": each.measured, "simulated": each.simulated}
    longest = max(window.seconds for window in windows.values())
    kinds = {bar.kind for window in windows.values() for bar in window.bars}
    charts = {
        name: place(
            f"timeline-{index}-{name}",
            timeline_chart(window.bars, window.workers, window.seconds if each.emulated else longest, kinds),
        )
        for name, window in windows.items()
    }
    return {
        "method": each.method,
        "run": each.run,
        "turns": each.turns,
        "emulated": each.emulated,
        "measured": charts["measured"],
        "simulated": charts["simulated"],
        "measured_turn": units.duration(each.measured.seconds / each.turns),
        "simulated_turn": units.duration(each.period),
        "measured_busy": f"{each.measured.busy:.0%}",
        "simulated_busy": f"{each.simulated.busy:.0%}",
    }
