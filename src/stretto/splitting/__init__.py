"""A model cut into balanced stages that hold its own modules."""

from stretto.splitting.splitter import Stages, divide, pieces, split

__all__ = ["Stages", "divide", "pieces", "split"]
