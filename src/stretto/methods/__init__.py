"""Methods: one file a paper, and the table of names."""

from stretto.methods.definition import Method
from stretto.methods.table import METHODS, method, with_microbatches

__all__ = ["METHODS", "Method", "method", "with_microbatches"]
