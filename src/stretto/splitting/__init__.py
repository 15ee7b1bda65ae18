"""A model cut into balanced stages that hold its own modules."""

from stretto.splitting.split import pieces, split
from stretto.splitting.stages import Stages

__all__ = ["Stages", "pieces", "split"]
