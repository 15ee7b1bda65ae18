"""Which weights a forward and a backward see."""

from stretto.weights.current import Current
from stretto.weights.double_buffered import DoubleBuffered
from stretto.weights.stash import Stash
from stretto.weights.weights import Weights

WEIGHTS: dict[str, type[Weights]] = {"current": Current, "stash": Stash, "double-buffered": DoubleBuffered}

__all__ = ["WEIGHTS", "Current", "DoubleBuffered", "Stash", "Weights"]
