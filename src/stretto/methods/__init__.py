"""Methods: one file a paper, and the table of names."""

from stretto.methods.backprop import BASELINE
from stretto.methods.definition import Method
from stretto.methods.planning import Planning, StageAt
from stretto.methods.table import METHODS, method, register, with_microbatches

__all__ = ["BASELINE", "METHODS", "Method", "Planning", "StageAt", "method", "register", "with_microbatches"]
