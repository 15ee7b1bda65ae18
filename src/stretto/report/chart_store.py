"""The charts of a page, as Vega-Lite specifications."""

from dataclasses import dataclass, field
from typing import Any

import altair as alt


@dataclass
class ChartSpecs:
    """The charts of a page by the id of their HTML element; data that several charts share is stored once."""

    charts: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)

    def add(self, element: str, chart: alt.LayerChart | None) -> str | None:
        """Keep a chart for the HTML element with this id and return the id; without a chart return None."""
        if chart is None:
            return None
        spec = chart.to_dict(validate=False)
        self.datasets.update(spec.pop("datasets", {}))
        spec.pop("config", None)  # the page has a light and a dark one
        self.charts[element] = spec
        return element

    def to_json(self) -> dict[str, Any]:
        """The object that the page's script reads: specifications by element id, and the data they name."""
        return {"charts": self.charts, "datasets": self.datasets}
