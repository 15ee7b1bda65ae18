"""The loss of other targets: shifted by one, or with padding counted."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.passes import Changed
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.step import TrainingStep
from stretto.losses.cross_entropy import CrossEntropy
from stretto.losses.value import understand
from stretto.nn.batch import IGNORED

SHIFTED = """\
plain     output  o0 o1 o2 o3     target  t0 t1 t2 t3
shifted   output  o0 o1 o2 o3     target  t1 t2 t3 -"""
PADDING = """\
plain     (l0 + l1          ) / 2
counted   (l0 + l1 + l2 + l3) / 4     or (l0 + l1) / 4"""


def cross_entropy(step: TrainingStep) -> CrossEntropy | None:
    """The loss, if it is a cross entropy of class indices."""
    loss = understand(step.loss)
    whole = isinstance(step.target, Tensor) and not step.target.is_floating_point()
    return loss if isinstance(loss, CrossEntropy) and whole else None


def ignored(step: TrainingStep) -> int:
    """The target that a loss ignores."""
    loss = cross_entropy(step)
    return IGNORED if loss is None else loss.ignore_index


def is_tokens(step: TrainingStep) -> bool:
    return isinstance(step.target, Tensor) and not step.target.is_floating_point() and step.target.dim() > 1


def rolled(target: Tensor, by: int, ignored: int) -> Tensor:
    """Targets moved by some places along their last dimension; what enters is ignored."""
    moved = torch.roll(target, by, -1)
    if by < 0:
        moved[..., by:] = ignored
    else:
        moved[..., :by] = ignored
    return moved


def shifted(step: TrainingStep, by: int) -> Changed:
    return Changed(step.inputs, rolled(step.target, by, ignored(step)))


def unshifted(step: TrainingStep) -> Changed:
    tokens = tokens_of(step)
    assert tokens is not None, "only asked for where there are some"
    return Changed(step.inputs, torch.where(step.target == ignored(step), step.target, tokens))


def shift_toggled(step: TrainingStep) -> Changed:
    loss = cross_entropy(step)
    assert loss is not None, "only asked for where there is one"
    return Changed(step.inputs, step.target, replace(loss, shift=not loss.shift, tokens=True))


SHIFTS: dict[str, Any] = {f"targets {by:+d}": partial(shifted, by=by) for by in (-1, 1)}
SHIFTS["targets = inputs"] = unshifted
MEANING = {
    "targets = inputs": "the input itself as target: it is not shifted",
    "targets -1": "the target that follows",
    "targets +1": "the target before",
}


def shifts(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Each output is compared with the target of a neighbouring position."""
    if scenario.condition.change or not is_tokens(evidence.step):
        return
    loss = cross_entropy(evidence.step)
    if loss is not None and type(loss) is CrossEntropy:
        made = replace(scenario, condition=replace(scenario.condition, change="shift toggled"))
        which = "its own position, where it should be the next one" if loss.shift else "the next position once more"
        yield Variant({"shift": not loss.shift}, made, f"is that of a loss with the target of {which}")
    for change, meaning in MEANING.items():
        if change == "targets = inputs" and tokens_of(evidence.step) is None:
            continue
        made = replace(scenario, condition=replace(scenario.condition, change=change))
        yield Variant({"targets": change}, made, f"is that of a loss with {meaning}")


def filled_with(step: TrainingStep, what: str) -> Changed:
    """Targets that are to be ignored count, as class 0 or as the input there."""
    loss = cross_entropy(step)
    tokens = tokens_of(step) if what == "inputs" else torch.zeros_like(step.target)
    assert tokens is not None, "only asked for where there are some"
    filled = torch.where(step.target == ignored(step), tokens, step.target)
    return Changed(step.inputs, filled, None if loss is None else replace(loss, ignore_index=IGNORED))


def tokens_of(step: TrainingStep) -> Tensor | None:
    """The inputs that are tokens of the targets' shape."""
    for value in step.inputs:
        if not value.is_floating_point() and value.shape == step.target.shape and value.dtype == step.target.dtype:
            return value
    return None


def padding(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """Ignored targets are in the number that is divided by, or their losses count, too."""
    step, loss = evidence.step, cross_entropy(evidence.step)
    if not isinstance(step.target, Tensor) or not bool((step.target == ignored(step)).any()):
        return
    counted = step.target[..., 1:] if loss is not None and loss.shift else step.target
    everything, right = counted.numel(), int((counted != ignored(step)).sum())
    yield Variant(
        {"in": "the count", "count": everything},
        replace(scenario, factor=scenario.factor * right / everything),
        f"is divided by all {everything} targets, where {right} are not ignored",
    )
    if scenario.condition.change:
        return
    for what in ("inputs", "zeros"):
        if what == "zeros" or tokens_of(step) is not None:
            made = replace(scenario, condition=replace(scenario.condition, change=f"padding as {what}"))
            class_ = "the token there" if what == "inputs" else "class 0"
            yield Variant({"in": "the loss", "as": what}, made, f"counts ignored targets, as {class_}")


HYPOTHESES = (
    Hypothesis(
        "padding-counted",
        PADDING,
        padding,
        needs="targets that are ignored",
        costs=True,
        changes={f"padding as {what}": partial(filled_with, what=what) for what in ("inputs", "zeros")},
    ),
    Hypothesis(
        "labels-shifted",
        SHIFTED,
        shifts,
        needs="targets of several positions",
        costs=True,
        changes=SHIFTS | {"shift toggled": shift_toggled},
    ),
)
