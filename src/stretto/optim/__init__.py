"""Optimizers, learning rates for large batches, and corrections of the optimizer step for delayed gradients."""

from stretto.nn.master_weights import Masters
from stretto.optim.basis_rotation import RotatedAdam
from stretto.optim.from_function import NamedOptimizer
from stretto.optim.layerwise import LAMB, LARS
from stretto.optim.learning_rates import Rescheduled, cosine, scale_for_batch, warmup
from stretto.optim.lion import Lion
from stretto.optim.muon_with_adamw import CombinedOptimizer, muon
from stretto.optim.parameter_labels import Label, labels_of
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
