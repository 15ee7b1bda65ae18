"""What an optimizer does about delay."""

from stretto.optim.reschedule import Rescheduled
from stretto.optim.spike import SpikeCompensation

__all__ = ["Rescheduled", "SpikeCompensation"]
