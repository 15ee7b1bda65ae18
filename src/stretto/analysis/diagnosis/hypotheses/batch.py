"""What a forward sees of a batch: statistics of a part, evaluation instead of training, other draws of dropout."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.passes import Changed
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.step import TrainingStep, block_names

STATISTICS = """\
plain        norm(x0 x1 x2 x3)
by part      norm(x0) norm(x1) norm(x2) norm(x3)"""
EVALUATION = """\
plain        model.train()
evaluation   model.eval()"""


def by_microbatch(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Each micro-batch's forward by itself, where the parts of a batch depend on each other."""
    if evidence.step.num_parts > 1 and not (scenario.condition.by_part or scenario.condition.whole):
        condition = replace(scenario.condition, by_part=True)
        what = f"is that of {evidence.step.num_parts} forwards, each with the statistics of its part of the batch"
        yield Variant({"parts": evidence.step.num_parts}, replace(scenario, condition=condition), what)


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """All modules in this one in evaluation; whoever entered puts the modes back."""
    module.eval()
    yield


def changes_of(step: TrainingStep) -> dict[str, Callable[[TrainingStep], Changed]]:
    """The whole model in evaluation, and each of its blocks that has another forward there."""
    return {f"evaluation {name}": partial(in_evaluation, name=name) for name in ("", *other_in_evaluation(step))}


def in_evaluation(step: TrainingStep, name: str) -> Changed:
    return Changed(step.inputs, step.target, context=partial(evaluation, step.model.get_submodule(name)))


def has_modes(module: nn.Module) -> bool:
    """Whether a module drops anything, or has statistics of its batches."""
    return isinstance(module, _NormBase) or (isinstance(module, _DropoutNd) and module.p > 0)


def other_in_evaluation(step: TrainingStep) -> list[str]:
    """Blocks and single modules with dropout or statistics of batches."""
    modules = dict(step.model.named_modules())
    names = {name: module for name, module in modules.items() if has_modes(module)}
    blocks = [block for block in block_names(step.model) if any(name.startswith(block + ".") for name in names)]
    return list(dict.fromkeys([*blocks, *names]))[:MOST_BLOCKS]


def evaluated(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """The modules are in evaluation mode: no dropout, running statistics."""
    if not evidence.step.model.training or scenario.condition.change:
        return
    for name in ("", *other_in_evaluation(evidence.step)):
        condition = replace(scenario.condition, change=f"evaluation {name}")
        what = "is that of evaluation mode" + (f" of {name}" if name else "")
        yield Variant({"module": name or "all"}, replace(scenario, condition=condition), what)


DROPOUT = """\
plain     dropout with one draw
differs   dropout with another one"""
REDRAWS = 6
MOST_BLOCKS = 12  # that are tried in evaluation, each alone
SPREAD = 1.5  # times the largest difference of two redraws is still one


def redrawn(evidence: Evidence, scenario: Scenario) -> torch.Tensor:
    """How far gradients of other draws of random numbers lie apart, by entry: the largest of some pairs."""
    draws = [replace(scenario, condition=replace(scenario.condition, seed=1000 * seed)) for seed in range(REDRAWS)]
    made = [evidence.made(draw) for draw in draws]
    lengths = torch.stack([evidence.total(each.square()).sqrt() for each in made]).amax(0)
    apart = [evidence.total((a - b).square()).sqrt() for a, b in itertools.combinations(made, 2)]
    return SPREAD * torch.stack(apart).amax(0) / torch.maximum(lengths, evidence.floors)


def dropout(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """All that is left is within the spread of other draws, where the model draws random numbers."""
    if evidence.passes.random and bool((fit.residuals <= redrawn(evidence, scenario)).all()):
        what = f"is within the spread of {REDRAWS} other draws of random numbers (dropout)"
        yield Variant({"redraws": REDRAWS}, scenario, what)


DROPOUT_DIFFERS = Hypothesis("dropout-differs", DROPOUT, dropout, needs="random numbers", costs=True)
HYPOTHESES = (
    Hypothesis("statistics-by-microbatch", STATISTICS, by_microbatch, needs="--microbatches or --replicas", costs=True),
    DROPOUT_DIFFERS,
    Hypothesis("evaluation-mode", EVALUATION, evaluated, costs=True),
)
