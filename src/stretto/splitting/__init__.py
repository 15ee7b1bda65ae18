"""A model cut into balanced stages that hold its own modules."""

from stretto.splitting.split import divide, pieces, split
from stretto.splitting.stages import Stages

__all__ = ["Stages", "divide", "pieces", "split"]
