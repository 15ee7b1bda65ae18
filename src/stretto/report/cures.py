"""The section on delay: its charts, and in words what charts on logarithmic axes leave out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import delay as charts
from stretto.report.charts.memory import fullest, memory_chart, together
from stretto.report.observed import Observed, observed
from stretto.report.page import Page
from stretto.report.palette import Style
from stretto.report.summary import MethodSummary

Place = Callable[[str, alt.LayerChart | None], str | None]  # keeps a chart under a name; None stays None


def cures(
    page: Page, summaries: Sequence[MethodSummary], styles: Mapping[str, Style], place: Place
) -> dict[str, Any] | None:
    """All that the section says; None for a page on which no method has a delay."""
    delays = {method: steady for method, steady in page.delays.items() if method in styles}
    if not any(any(steady) for steady in delays.values()):
        return None
    seen = observed(summaries, page.records)
    groups = grouped(delays)
    return {
        "delay": place("delay", charts.delay_chart(groups, styles)),
        "groups": [
            {"style": styles[methods[0]], "methods": ", ".join(methods), "delays": written(steady)}
            for steady, methods in groups.items()
        ],
        "mismatch": place("mismatch", charts.mismatch_chart(seen, styles)),
        "mismatch_by_stage": place("mismatch-stage", charts.mismatch_by_stage_chart(seen, styles)),
        "matching": ", ".join(each.method for each in seen if each.matches),
        "prediction": place("prediction", charts.prediction_chart(seen, styles)),
        "gain": place("gain", charts.gain_chart(seen, styles)),
        "memory": [
            place("memory-fullest", memory_chart(seen, "stage that holds most", fullest)),
            place("memory-all", memory_chart(seen, "all stages", together)),
        ]
        if seen
        else [],
        "held": [held(each) for each in seen],
        "stages": list(range(max((len(each.weight_bytes) for each in seen), default=0))),
    }


def grouped(delays: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], list[str]]:
    """The methods that have the same delays, from the largest to none."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for method, steady in delays.items():
        groups.setdefault(steady, []).append(method)
    return dict(sorted(groups.items(), key=lambda item: -sum(item[0])))


def written(steady: Sequence[int]) -> str:
    """Delays in a row; a single word where there are none."""
    return " ".join(str(delay) for delay in steady) if any(steady) else "none"


def held(seen: Observed) -> dict[str, Any]:
    """A method's memory, stage by stage: weights + activations."""
    pairs = zip(seen.weight_bytes, seen.activation_bytes, strict=True)
    return {"method": seen.method, "cells": [[units.bytes_held(weights), units.bytes_held(a)] for weights, a in pairs]}
