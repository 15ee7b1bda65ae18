"""A model cut into balanced stages that hold its own modules."""

from stretto.splitting.split import split
from stretto.splitting.stages import Stages

__all__ = ["Stages", "split"]
