"""Optimizers, learning rates for large batches, and corrections of the optimizer step for delayed gradients."""

from stretto.nn.master_weights import Masters
from stretto.optim.basis_rotation import RotatedAdam
from stretto.optim.batch_scaling import scale_for_batch
from stretto.optim.combined import CombinedOptimizer
from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.lion import Lion
from stretto.optim.muon_with_adamw import muon
from stretto.optim.named import NamedOptimizer
from stretto.optim.parameter_labels import Label, labels_of
from stretto.optim.reschedule import Rescheduled
from stretto.optim.schedulers import cosine, warmup
from stretto.optim.soap import SOAP
from stretto.optim.spike import SpikeCompensation
from stretto.optim.update_feedback import UpdateFeedback

__all__ = [
    "LAMB",
    "LARS",
    "SOAP",
    "CombinedOptimizer",
    "Label",
    "Lion",
    "Masters",
    "NamedOptimizer",
    "Rescheduled",
    "RotatedAdam",
    "SpikeCompensation",
    "UpdateFeedback",
    "cosine",
    "labels_of",
    "muon",
    "scale_for_batch",
    "warmup",
]
