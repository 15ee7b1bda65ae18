"""Which weights a forward and a backward see."""

from stretto.weights.current import Current, Plain
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
from stretto.weights.weights import Weights

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
