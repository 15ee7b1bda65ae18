"""Optimizers and learning rates for large batches, and corrections of the optimizer step for delayed gradients."""

from stretto.nn.master_weights import Masters
from stretto.optim.basis_rotation import RotatedAdam
from stretto.optim.batch_scaling import scale_for_batch
from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.named import NamedOptimizer
from stretto.optim.reschedule import Rescheduled
from stretto.optim.schedulers import cosine, warmup
from stretto.optim.spike import SpikeCompensation
from stretto.optim.update_feedback import UpdateFeedback

__all__ = [
    "LAMB",
    "LARS",
    "Masters",
    "NamedOptimizer",
    "Rescheduled",
    "RotatedAdam",
    "SpikeCompensation",
    "UpdateFeedback",
    "cosine",
    "scale_for_batch",
    "warmup",
]
