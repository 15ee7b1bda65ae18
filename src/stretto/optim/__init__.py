"""What an optimizer does about delay."""

from stretto.optim.masters import Masters
from stretto.optim.reschedule import Rescheduled
from stretto.optim.spike import SpikeCompensation

__all__ = ["Masters", "Rescheduled", "SpikeCompensation"]
