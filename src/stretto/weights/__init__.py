"""Which weights a forward and a backward see."""

from stretto.weights.current import Current
from stretto.weights.double_buffered import DoubleBuffered
from stretto.weights.forward_backward_rules import Substituted
from stretto.weights.live import Live
from stretto.weights.predicted import Predicted
from stretto.weights.stash import Stash
from stretto.weights.synchronous_phase import Plain
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
