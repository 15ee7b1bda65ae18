"""Which weights a forward and a backward see.

Stash runs each forward on leaves that share storage with the parameters (`functional_call`) and moves the parameters
to fresh storage in an update while a graph holds the old one. The first operation of SGD's, Adam's or AdamW's step
that changes a large weight writes there (`stash.py`); other optimizers get copies: they might write by a view.

`predict="step"` looks ahead along what the optimizer last did: momentum's velocity, Adam's m_hat / (sqrt(v_hat) +
eps), AdamW's decay beside it, at the rates that the scheduler will set: a twin of the optimizer with nothing to train
goes through the schedule ahead of it.

Masters (`precision="bf16"`): weights, activations and messages are bfloat16, and the optimizer steps float32 masters.
Rules that predict or correct meet the masters and are rounded once (`Rounded`). Norms with running statistics stay in
float32.

The observer asks after each action and writes nothing, so training comes to the same numbers with it and without.
"""

from stretto.weights.forward_backward_rules import Live, Substituted
from stretto.weights.stash import DoubleBuffered, Predicted, Stash
from stretto.weights.value_rules import (
    Correction,
    CurrentRule,
    Interpolated,
    Rule,
    StepPrediction,
    VelocityPrediction,
    WeightPrediction,
)
from stretto.weights.weights import Current, Plain, Weights

WEIGHTS: dict[str, type[Weights]] = {"current": Current, "stash": Stash, "double-buffered": DoubleBuffered}

__all__ = [
    "WEIGHTS",
    "Correction",
    "Current",
    "CurrentRule",
    "DoubleBuffered",
    "Interpolated",
    "Live",
    "Plain",
    "Predicted",
    "Rule",
    "Stash",
    "StepPrediction",
    "Substituted",
    "VelocityPrediction",
    "WeightPrediction",
    "Weights",
]
