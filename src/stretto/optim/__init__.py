"""Optimizers for large batches, rates for them, and what an optimizer does about delay."""

from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.masters import Masters
from stretto.optim.reschedule import Rescheduled
from stretto.optim.scaling import scale_for_batch
from stretto.optim.spike import SpikeCompensation
from stretto.optim.warmup import cosine, warmup

__all__ = [
    "LAMB",
    "LARS",
    "Masters",
    "Rescheduled",
    "SpikeCompensation",
    "cosine",
    "scale_for_batch",
    "warmup",
]
