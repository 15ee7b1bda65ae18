"""A mistake in computing a gradient: its name, its picture, and the scenarios that it leads to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.scenario import Scenario


class Variant(NamedTuple):
    """A mistake with its options, made in a scenario, in the gradients of some entries, or of all.

    `what` completes "the gradient ...". `free` counts the numbers that were taken from the gradients themselves.
    """

    options: Mapping[str, Any]
    scenario: Scenario
    what: str
    entries: Sequence[int] | None = None
    free: int = 0


Variants = Callable[[Evidence, Scenario, ScenarioFit], Iterator[Variant]]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake. `needs`: what must be given for it to be looked for. `costs`: forwards and backwards of its own."""

    name: str
    picture: str
    variants: Variants
    needs: str = ""
    costs: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


def numbers(values: Sequence[int]) -> str:
    """Numbers of parts in words, counted from 0: "2", "0 to 6", "1, 3"."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))
