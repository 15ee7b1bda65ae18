"""Mistakes of the optimizer's step, where the weights before and after it are known."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from stretto.analysis.diagnosis.evidence import Evidence, ScenarioFit
from stretto.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Variant
from stretto.analysis.diagnosis.scenario import Scenario

DECAY = """\
plain     w - lr * (u + decay * w)
twice     w - lr * (u + 2 * decay * w)"""
COUPLED = """\
plain     w - lr * (adam(g) + decay * w)
coupled   w - lr * adam(g + decay * w)"""
MOMENTUM = """\
plain     m * b + g
twice     m * (m * b + g) + g      or 2 * m * b + g"""
CORRECTION = """\
plain     (1 - beta1) * g / (1 - beta1 ** t)
without   (1 - beta1) * g"""
STATE = """\
plain     m * b + g
lost      g"""
TWICE = """\
plain     w - lr * u
twice     w - lr * u - lr * u'"""
RATE = """\
plain     w - lr_t * u
another   w - lr_(t-1) * u"""
MANY = 1e9  # steps after which nothing is left to correct


def decay_twice(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 2 * group.get("weight_decay", 0)


def decay_coupling(optimizer: torch.optim.Optimizer) -> None:
    """Decoupled decay becomes coupled, and the other way round."""
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if "decoupled_weight_decay" in group:
            group["decoupled_weight_decay"] = not group["decoupled_weight_decay"]
        else:
            for parameter in group["params"]:
                parameter.data.mul_(1 - group["lr"] * decay)
            group["weight_decay"] = 0


def buffer_twice(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"] = 2 * state["momentum_buffer"]


def accumulated_twice(optimizer: torch.optim.Optimizer) -> None:
    """The momentum buffer takes the gradient in once before the step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] + parameter.grad


def without_correction(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(MANY)


def without_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def stepped_twice(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


CHANGES: dict[str, Any] = {
    "decay twice": decay_twice,
    "decay coupling": decay_coupling,
    "buffer twice": buffer_twice,
    "accumulated twice": accumulated_twice,
    "without correction": without_correction,
    "without state": without_state,
    "stepped twice": stepped_twice,
}


def changed(*changes: str, what: str) -> Any:
    """Variants with these changes of the optimizer."""

    def variants(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
        if evidence.gradients.rule is None or scenario.update:
            return
        for change in changes:
            yield Variant({"form": change}, replace(scenario, update=change), what)

    return variants


def learning_rate(evidence: Evidence, scenario: Scenario, fit: ScenarioFit) -> Iterator[Variant]:
    """All changes of weights have one factor: that of a neighbouring step's learning rate."""
    if evidence.gradients.rule is None or scenario.update:
        return
    wrong = ~evidence.good(fit.residuals) & (fit.scaled <= 4 * evidence.tolerance)
    if bool(wrong.any()):
        factor = float(fit.scales[wrong].median())
        options = {"factor": factor}
        made = replace(scenario, rate=scenario.rate * factor)
        yield Variant(options, made, f"is that of {factor:.6g} times the learning rate", free=1)


NEEDS = "--after and --optimizer"
HYPOTHESES = (
    Hypothesis("decay-twice", DECAY, changed("decay twice", what="has weight decay twice"), needs=NEEDS),
    Hypothesis(
        "momentum-twice", MOMENTUM, changed("buffer twice", "accumulated twice", what="has momentum twice"), needs=NEEDS
    ),
    Hypothesis(
        "bias-correction",
        CORRECTION,
        changed("without correction", what="lacks the correction of the first steps' moments"),
        needs=NEEDS,
    ),
    Hypothesis(
        "state-lost", STATE, changed("without state", what="is that of an optimizer without its state"), needs=NEEDS
    ),
    Hypothesis("stepped-twice", TWICE, changed("stepped twice", what="is that of two steps"), needs=NEEDS),
    Hypothesis("learning-rate", RATE, learning_rate, needs=NEEDS),
)
