"""A model cut into balanced stages that hold its own modules."""

from stretto.splitting.splitter import divide, pieces, split
from stretto.splitting.stages import Stages

__all__ = ["Stages", "divide", "pieces", "split"]
