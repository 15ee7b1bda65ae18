"""The gradient of weights some updates before, of all stages or of the first ones."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.step import beginnings, block_names

PICTURE = """\
plain     forward and backward with W_n
stale     forward and backward with W_(n-d), or the forward alone"""
MOST_CUTS = 12  # places between old and new weights that are tried


def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """All weights earlier; then those before, or from, a beginning of a stage."""
    step = evidence.step
    earlier = [name for name in step.parameters if name in step.earlier]
    if not earlier or scenario.condition.earlier:
        return
    everything = frozenset(earlier)
    yield stale(scenario, everything, "of all stages", {"stages": "all"})
    yield mixed(scenario, everything, "of all stages", {"stages": "all"})
    names = list(step.parameters)
    uses = evidence.passes[scenario.condition].values
    for first in beginnings(step)[:MOST_CUTS]:
        place = names.index(first)
        for part, where in ((names[:place], f"before {first}"), (names[place:], f"from {first} on")):
            chosen = everything & frozenset(part)
            if chosen and chosen != everything:
                yield stale(scenario, chosen, where, {"stages": where})
                yield mixed(scenario, chosen, where, {"stages": where})
                tied = [name for name in chosen if uses[name].shape[1] > 1]
                if tied:  # a copy in each of two stages
                    use = 0 if where.startswith("before") else 1
                    apart = chosen - frozenset(tied) | {f"{name}#{use}" for name in tied}
                    yield stale(scenario, apart, where, {"stages": where, "copies": tied})
                tied = [name for name in everything - chosen if uses[name].shape[1] > 1]
                if tied:
                    use = 0 if where.startswith("before") else 1
                    more = chosen | {f"{name}#{use}" for name in tied}
                    yield stale(scenario, more, where, {"stages": where, "copies": tied})
    for block in block_names(step.model)[:MOST_CUTS]:
        chosen = frozenset(name for name in everything if name.startswith(block + "."))
        if chosen and chosen != everything:
            yield stale(scenario, chosen, f"of {block}", {"stages": block})
    for name in everything:
        for use in range(uses[name].shape[1] if uses[name].shape[1] > 1 else 0):
            copy = frozenset({f"{name}#{use}"})
            yield stale(scenario, copy, f"of one copy of {name}", {"stages": name, "use": use})


def stale(scenario: Scenario, earlier: frozenset[str], where: str, options: dict[str, Any]) -> Variant:
    condition = replace(scenario.condition, earlier=earlier)
    return Variant(options, replace(scenario, condition=condition), f"is that of the earlier weights {where}")


def mixed(scenario: Scenario, earlier: frozenset[str], where: str, options: dict[str, Any]) -> Variant:
    """The forward had the earlier weights, and the backward the present ones."""
    condition = replace(scenario.condition, earlier=earlier, present=True)
    what = f"is that of a forward with the earlier weights {where} and a backward with the present ones"
    return Variant(options | {"backward": "present"}, replace(scenario, condition=condition), what)


HYPOTHESIS = Hypothesis("stale", PICTURE, variants, needs="--earlier", costs=True)
