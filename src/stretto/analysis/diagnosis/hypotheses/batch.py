"""What a forward sees of a batch: statistics of a part, evaluation instead of training, other draws of dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import nn

from stretto.analysis.diagnosis.evidence import Evidence, Fit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.passes import Changed
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.step import Step

STATISTICS = """\
plain        norm(x0 x1 x2 x3)
by part      norm(x0) norm(x1) norm(x2) norm(x3)"""
EVALUATION = """\
plain        model.train()
evaluation   model.eval()"""


def by_microbatch(evidence: Evidence, scenario: Scenario, fit: Fit) -> Iterator[Variant]:
    """Each micro-batch's forward by itself, where the parts of a batch depend on each other."""
    if evidence.step.num_parts > 1 and not scenario.condition.by_part:
        condition = replace(scenario.condition, by_part=True)
        what = f"is that of {evidence.step.num_parts} forwards, each with the statistics of its part of the batch"
        yield Variant({"parts": evidence.step.num_parts}, replace(scenario, condition=condition), what)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """All modules in evaluation; whoever entered puts the modes back."""
    model.eval()
    yield


def in_evaluation(step: Step) -> Changed:
    return Changed(step.inputs, step.target, context=partial(evaluation, step.model))


def evaluated(evidence: Evidence, scenario: Scenario, fit: Fit) -> Iterator[Variant]:
    """The modules are in evaluation mode: no dropout, running statistics."""
    if evidence.step.model.training and not scenario.condition.change:
        condition = replace(scenario.condition, change="evaluation")
        yield Variant({}, replace(scenario, condition=condition), "is that of evaluation mode")


HYPOTHESES = (
    Hypothesis("statistics-by-microbatch", STATISTICS, by_microbatch, needs="--microbatches or --replicas", costs=True),
    Hypothesis("evaluation-mode", EVALUATION, evaluated, costs=True, changes={"evaluation": in_evaluation}),
)
