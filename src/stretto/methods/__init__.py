"""Methods: one file a family of papers, and the table of names."""

from stretto.methods.definition import Method
from stretto.methods.planning import Planning, StageAt
from stretto.methods.synchronous_pipelines import BASELINE
from stretto.methods.table import METHODS, method, register, with_microbatches

__all__ = ["BASELINE", "METHODS", "Method", "Planning", "StageAt", "method", "register", "with_microbatches"]
